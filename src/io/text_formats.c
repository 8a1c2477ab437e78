/*
 * text_formats.c - JSON objects, flat YAML mappings and numbers in text.
 *
 * The libraries parse; here their habits are narrowed to what a configuration may be, and every
 * error gets the file and line. Numbers are ours because a library's idea of one depends on the
 * process's locale (0,1) or on YAML 1.1 (2e-5 is a string there).
 */
#include <errno.h>
#include <limits.h>
#include <locale.h>
#include <stdlib.h>
#include <yaml.h>

#include "io/io.h"

#define YAML_BYTES_MAX   ((size_t)16 << 20) // a configuration; the parser's time is not linear
#define YAML_DEPTH_MAX   16
#define NUMBER_CHARS_MAX 512

/* ---- numbers -------------------------------------------------------------------------------- */

static bool is_digit(char c, int base)
{
    const char lower = (char)(c | 0x20);
    return (c >= '0' && c <= '9') || (base == 16 && lower >= 'a' && lower <= 'f');
}

dpl_status dpl_parse_i64(const char *text, int64_t *value_out)
{
    const char *at = text;
    const bool minus = *at == '-';
    if (*at == '-' || *at == '+') at++;
    const int base = at[0] == '0' && (at[1] | 0x20) == 'x' ? 16 : 10;
    if (base == 16) at += 2;
    if (!is_digit(*at, base) || (base == 10 && at[0] == '0' && at[1] != '\0'))
        return dpl_fail(DPL_EINVAL, "'%.60s' is not an integer", text);
    const uint64_t limit = (uint64_t)INT64_MAX + minus;
    uint64_t value = 0;
    for (; *at; at++) {
        // The character before an underscore is a digit already.
        if (*at == '_' && is_digit(at[1], base)) continue;
        if (!is_digit(*at, base)) return dpl_fail(DPL_EINVAL, "'%.60s' is not an integer", text);
        const int digit = *at <= '9' ? *at - '0' : (*at | 0x20) - 'a' + 10;
        if (__builtin_mul_overflow(value, (uint64_t)base, &value) ||
            __builtin_add_overflow(value, (uint64_t)digit, &value) || value > limit)
            return dpl_fail(DPL_EINVAL, "'%.60s' does not fit in 64 bits", text);
    }
    *value_out = minus ? (int64_t)(0 - value) : (int64_t)value;
    return DPL_OK;
}

// Copies digits to *to, dropping underscores between them; returns how many digits there were.
static size_t copy_digits(const char **from, char **to)
{
    size_t n = 0;
    for (;; (*from)++) {
        if (is_digit(**from, 10))
            *(*to)++ = **from, n++;
        else if (!(**from == '_' && n > 0 && is_digit((*from)[1], 10)))
            return n;
    }
}

// Checks the form of a decimal number and copies it to `plain` without its underscores.
static bool plain_number(const char *text, char *plain)
{
    if (strlen(text) >= NUMBER_CHARS_MAX) return false;
    const char *at = text;
    if (*at == '-' || *at == '+') *plain++ = *at++;
    size_t n_digits = copy_digits(&at, &plain);
    if (*at == '.') {
        *plain++ = *at++;
        n_digits += copy_digits(&at, &plain);
    }
    if (n_digits == 0) return false;
    if ((*at | 0x20) == 'e') {
        *plain++ = *at++;
        if (*at == '-' || *at == '+') *plain++ = *at++;
        if (copy_digits(&at, &plain) == 0) return false;
    }
    *plain = '\0';
    return *at == '\0';
}

dpl_status dpl_parse_f64(const char *text, double *value_out)
{
    char plain[NUMBER_CHARS_MAX];
    int64_t integer;
    if (!plain_number(text, plain)) { // Hexadecimal is left.
        if (dpl_parse_i64(text, &integer) != DPL_OK)
            return dpl_fail(DPL_EINVAL, "'%.60s' is not a finite number", text);
        *value_out = (double)integer;
        return DPL_OK;
    }
    const locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c_locale) return dpl_fail(DPL_ENOMEM, "no memory to read the number '%.60s'", text);
    const double value = strtod_l(plain, NULL, c_locale);
    freelocale(c_locale);
    if (value - value != 0.0)
        return dpl_fail(DPL_EINVAL, "'%.60s' is larger than any finite number", text);
    *value_out = value;
    return DPL_OK;
}

/* ---- JSON ----------------------------------------------------------------------------------- */

dpl_status dpl_json_read(const char *path, json_t **object_out)
{
    dpl_map map;
    DPL_TRY(dpl_map_open(path, &map));
    json_error_t error;
    json_t *json = json_loadb((const char *)map.data, map.bytes, JSON_REJECT_DUPLICATES, &error);
    dpl_map_close(&map);
    if (!json)
        return dpl_fail(DPL_EFORMAT, "%s: line %d, byte %d: %s", path, error.line, error.position,
                        error.text);
    if (!json_is_object(json)) {
        json_decref(json);
        return dpl_fail(DPL_EFORMAT, "%s: byte 0: not a JSON object", path);
    }
    *object_out = json;
    return DPL_OK;
}

dpl_status dpl_json_write(const char *path, const json_t *object)
{
    char *text = json_dumps(object, JSON_INDENT(2) | JSON_ENCODE_ANY);
    if (!text) return dpl_fail(DPL_ENOMEM, "no memory for the text of %s", path);
    const size_t bytes = strlen(text);
    text[bytes] = '\n'; // The file has no terminator, so its place serves for the last line's end.
    const dpl_status status = dpl_write_file(path, text, bytes + 1);
    free(text);
    return status;
}

/* ---- YAML ----------------------------------------------------------------------------------- */

typedef struct yaml_reader {
    yaml_parser_t parser;
    yaml_event_t event; // the current one
    const char *path;
    json_t *seen; // key -> line
    dpl_yaml_fn fn;
    void *arg;
} yaml_reader;

static int event_line(const yaml_reader *reader)
{
    return (int)reader->event.start_mark.line + 1;
}

static dpl_status fail_here(const yaml_reader *reader, const char *what)
{
    return dpl_fail(DPL_EFORMAT, "%s:%d: %s", reader->path, event_line(reader), what);
}

static dpl_status next_event(yaml_reader *reader)
{
    yaml_event_delete(&reader->event);
    if (yaml_parser_parse(&reader->parser, &reader->event)) return DPL_OK;
    const yaml_parser_t *p = &reader->parser;
    if (p->error == YAML_MEMORY_ERROR)
        return dpl_fail(DPL_ENOMEM, "no memory to read %s", reader->path);
    if (p->error == YAML_READER_ERROR)
        return dpl_fail(DPL_EFORMAT, "%s: byte %zu: %s", reader->path, p->problem_offset,
                        p->problem);
    return dpl_fail(DPL_EFORMAT, "%s:%zu: %s", reader->path, p->problem_mark.line + 1,
                    p->problem ? p->problem : "not YAML");
}

static dpl_status refuse_extras(const yaml_reader *reader, const yaml_char_t *anchor,
                                const yaml_char_t *tag)
{
    if (anchor) return fail_here(reader, "anchors are not supported");
    return tag ? fail_here(reader, "tags are not supported") : DPL_OK;
}

// The text of a scalar event; anything that would not be plain text is refused.
static dpl_status scalar_text(const yaml_reader *reader, const char **text_out)
{
    const yaml_event_t *event = &reader->event;
    if (event->type == YAML_ALIAS_EVENT) return fail_here(reader, "aliases are not supported");
    if (event->type != YAML_SCALAR_EVENT) return fail_here(reader, "expected a plain value");
    DPL_TRY(refuse_extras(reader, event->data.scalar.anchor, event->data.scalar.tag));
    const char *text = (const char *)event->data.scalar.value;
    if (strlen(text) != event->data.scalar.length) return fail_here(reader, "a NUL in the text");
    *text_out = text;
    return DPL_OK;
}

static bool is_plain(const yaml_reader *reader)
{
    return reader->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
}

static bool is_null(const char *text)
{
    return !*text || !strcmp(text, "~") || !strcmp(text, "null") || !strcmp(text, "Null") ||
           !strcmp(text, "NULL");
}

static json_t *scalar_json(const char *text, bool plain)
{
    int64_t integer;
    double real;
    if (!plain) return json_string(text);
    if (is_null(text)) return json_null();
    if (!strcasecmp(text, "true")) return json_true();
    if (!strcasecmp(text, "false")) return json_false();
    if (dpl_parse_i64(text, &integer) == DPL_OK) return json_integer(integer);
    if (dpl_parse_f64(text, &real) == DPL_OK) return json_real(real);
    return json_string(text);
}

// From a sequence's start event to its end event.
static dpl_status read_sequence(yaml_reader *reader, int depth, json_t **array_out)
{
    if (depth > YAML_DEPTH_MAX) return fail_here(reader, "lists are nested too deep");
    DPL_TRY(refuse_extras(reader, reader->event.data.sequence_start.anchor,
                          reader->event.data.sequence_start.tag));
    json_t *array = json_array();
    if (!array) return dpl_fail(DPL_ENOMEM, "no memory to read %s", reader->path);
    dpl_status status;
    while ((status = next_event(reader)) == DPL_OK &&
           reader->event.type != YAML_SEQUENCE_END_EVENT) {
        json_t *item = NULL;
        const char *text;
        if (reader->event.type == YAML_SEQUENCE_START_EVENT)
            status = read_sequence(reader, depth + 1, &item);
        else if ((status = scalar_text(reader, &text)) == DPL_OK)
            item = scalar_json(text, is_plain(reader));
        if (status == DPL_OK && json_array_append_new(array, item) != 0)
            status = dpl_fail(DPL_ENOMEM, "no memory to read %s", reader->path);
        if (status != DPL_OK) break;
    }
    if (status == DPL_OK)
        *array_out = array;
    else
        json_decref(array);
    return status;
}

// Hands key and value to the caller; the current event is the value's first.
static dpl_status read_value(yaml_reader *reader, const char *key, int line)
{
    const char *text;
    char *json_text = NULL;
    if (reader->event.type == YAML_MAPPING_START_EVENT)
        return fail_here(reader, "a mapping inside the mapping; keys must be flat");
    if (reader->event.type == YAML_SEQUENCE_START_EVENT) {
        json_t *array;
        DPL_TRY(read_sequence(reader, 1, &array));
        text = json_text = json_dumps(array, JSON_ENCODE_ANY);
        json_decref(array);
        if (!text) return dpl_fail(DPL_ENOMEM, "no memory to read %s", reader->path);
    } else {
        DPL_TRY(scalar_text(reader, &text));
        if (is_plain(reader) && is_null(text)) text = "";
    }
    const dpl_status status = reader->fn(reader->arg, key, text, line);
    free(json_text);
    return status == DPL_OK ? status : dpl_fail_in(status, "%s:%d", reader->path, line);
}

static dpl_status read_mapping(yaml_reader *reader)
{
    DPL_TRY(refuse_extras(reader, reader->event.data.mapping_start.anchor,
                          reader->event.data.mapping_start.tag));
    for (;;) {
        DPL_TRY(next_event(reader));
        if (reader->event.type == YAML_MAPPING_END_EVENT) return DPL_OK;
        const char *text;
        DPL_TRY(scalar_text(reader, &text));
        const int line = event_line(reader);
        const json_t *earlier = json_object_get(reader->seen, text);
        if (earlier)
            return dpl_fail(DPL_EFORMAT, "%s:%d: the key '%s' stands on line %lld already",
                            reader->path, line, text, (long long)json_integer_value(earlier));
        char *key = dpl_strdup(text);
        if (!key || json_object_set_new(reader->seen, text, json_integer(line)) != 0) {
            dpl_free(key);
            return dpl_fail(DPL_ENOMEM, "no memory to read %s", reader->path);
        }
        dpl_status status = next_event(reader);
        if (status == DPL_OK) status = read_value(reader, key, line);
        dpl_free(key);
        DPL_TRY(status);
    }
}

static dpl_status read_document(yaml_reader *reader)
{
    DPL_TRY(next_event(reader)); // stream start
    DPL_TRY(next_event(reader));
    if (reader->event.type == YAML_STREAM_END_EVENT) return DPL_OK; // Nothing but comments.
    DPL_TRY(next_event(reader));
    if (reader->event.type == YAML_MAPPING_START_EVENT) {
        DPL_TRY(read_mapping(reader));
    } else {
        const char *text = "";
        if (reader->event.type == YAML_SCALAR_EVENT) DPL_TRY(scalar_text(reader, &text));
        if (reader->event.type != YAML_SCALAR_EVENT || *text)
            return fail_here(reader, "expected lines of the form 'key: value'");
    }
    DPL_TRY(next_event(reader)); // document end
    DPL_TRY(next_event(reader));
    if (reader->event.type != YAML_STREAM_END_EVENT) return fail_here(reader, "a second document");
    return DPL_OK;
}

dpl_status dpl_yaml_read(const char *path, dpl_yaml_fn fn, void *arg)
{
    dpl_map map;
    DPL_TRY(dpl_map_open(path, &map));
    yaml_reader reader = {.path = path, .fn = fn, .arg = arg};
    dpl_status status;
    if (map.bytes > YAML_BYTES_MAX) {
        status = dpl_fail(DPL_EFORMAT, "%s: %zu bytes; a configuration has at most %zu", path,
                          map.bytes, YAML_BYTES_MAX);
    } else if (!(reader.seen = json_object()) || !yaml_parser_initialize(&reader.parser)) {
        status = dpl_fail(DPL_ENOMEM, "no memory to read %s", path);
    } else {
        yaml_parser_set_input_string(&reader.parser, map.data, map.bytes);
        status = read_document(&reader);
        yaml_event_delete(&reader.event);
        yaml_parser_delete(&reader.parser);
    }
    json_decref(reader.seen);
    dpl_map_close(&map);
    return status;
}
