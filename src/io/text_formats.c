/*
 * text_formats.c - JSON objects, flat YAML mappings and numbers in text.
 *
 * The libraries parse; here their habits are narrowed to what a configuration may be, and every
 * error gets the file and line. Numbers are ours because a library's idea of one depends on the
 * process's locale (0,1) or on YAML 1.1 (2e-5 is a string there).
 */
#include <ctype.h>
#include <errno.h>
#include <locale.h>
#include <stdlib.h>
#include <yaml.h>

#include "io/io.h"

#define YAML_BYTES_MAX   ((size_t)16 << 20) // a configuration; the parser's time is not linear
#define YAML_DEPTH_MAX   16
#define NUMBER_CHARS_MAX 512

/* ---- numbers -------------------------------------------------------------------------------- */

// Copies a number without the underscores between its digits; false: other ones, or too long.
static bool drop_underscores(const char *text, bool hex, char *plain) {
    int (*const is_digit)(int) = hex ? isxdigit : isdigit;
    if (strlen(text) >= NUMBER_CHARS_MAX) return false;
    for (size_t i = 0; text[i]; i++) {
        if (text[i] != '_') *plain++ = text[i];
        else if (i == 0 || !is_digit((uint8_t)text[i - 1]) || !is_digit((uint8_t)text[i + 1]))
            return false;
    }
    *plain = '\0';
    return true;
}

dpl_status dpl_parse_i64(const char *text, int64_t *value_out) {
    char plain[NUMBER_CHARS_MAX], *end;
    const char *digits = text + (*text == '-' || *text == '+');
    const bool hex = digits[0] == '0' && (digits[1] | 0x20) == 'x';
    if (!isdigit((uint8_t)*digits) || (*digits == '0' && digits[1] && !hex) ||
        !drop_underscores(text, hex, plain))
        return dpl_fail(DPL_EINVAL, "'%.60s' is not an integer", text);
    errno = 0;
    const long long value = strtoll(plain, &end, hex ? 16 : 10);
    if (*end) return dpl_fail(DPL_EINVAL, "'%.60s' is not an integer", text);
    if (errno != 0) return dpl_fail(DPL_EINVAL, "'%.60s' does not fit in 64 bits", text);
    *value_out = value;
    return DPL_OK;
}

dpl_status dpl_parse_f64(const char *text, double *value_out) {
    char plain[NUMBER_CHARS_MAX], *end = plain;
    int64_t integer;
    if (strpbrk(text, "xX") && dpl_parse_i64(text, &integer) == DPL_OK) {
        *value_out = (double)integer;
        return DPL_OK;
    }
    // What strtod takes beyond these characters (spaces, nan, 0x1p3) is no number here.
    if (text[strspn(text, "0123456789+-.eE_")] || !drop_underscores(text, false, plain))
        return dpl_fail(DPL_EINVAL, "'%.60s' is not a finite number", text);
    const locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c_locale) return dpl_fail(DPL_ENOMEM, "no memory to read the number '%.60s'", text);
    const double value = strtod_l(plain, &end, c_locale);
    freelocale(c_locale);
    if (end == plain || *end) return dpl_fail(DPL_EINVAL, "'%.60s' is not a finite number", text);
    if (value - value != 0.0)
        return dpl_fail(DPL_EINVAL, "'%.60s' is larger than any finite number", text);
    *value_out = value;
    return DPL_OK;
}

/* ---- JSON ----------------------------------------------------------------------------------- */

dpl_status dpl_json_read(const char *path, json_t **object_out) {
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

dpl_status dpl_json_write(const char *path, const json_t *object) {
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

static int event_line(const yaml_reader *reader) {
    return (int)reader->event.start_mark.line + 1;
}

static dpl_status fail_here(const yaml_reader *reader, const char *what) {
    return dpl_fail(DPL_EFORMAT, "%s:%d: %s", reader->path, event_line(reader), what);
}

static dpl_status fail_memory(const yaml_reader *reader) {
    return dpl_fail(DPL_ENOMEM, "no memory to read %s", reader->path);
}

// Moves to the next event, which is none that would be more than plain text and lists.
static dpl_status next_event(yaml_reader *reader) {
    const yaml_parser_t *p = &reader->parser;
    const yaml_event_t *e = &reader->event;
    yaml_event_delete(&reader->event);
    if (!yaml_parser_parse(&reader->parser, &reader->event)) {
        if (p->error == YAML_MEMORY_ERROR) return fail_memory(reader);
        if (p->error == YAML_READER_ERROR)
            return dpl_fail(DPL_EFORMAT, "%s: byte %zu: %s", reader->path, p->problem_offset,
                            p->problem);
        return dpl_fail(DPL_EFORMAT, "%s:%zu: %s", reader->path, p->problem_mark.line + 1,
                        p->problem ? p->problem : "not YAML");
    }
    if (e->type == YAML_ALIAS_EVENT) return fail_here(reader, "aliases are not supported");
    if (e->type != YAML_SCALAR_EVENT && e->type != YAML_SEQUENCE_START_EVENT &&
        e->type != YAML_MAPPING_START_EVENT)
        return DPL_OK;
    // The data of these three begin alike.
    if (e->data.scalar.anchor) return fail_here(reader, "anchors are not supported");
    if (e->data.scalar.tag) return fail_here(reader, "tags are not supported");
    if (e->type == YAML_SCALAR_EVENT &&
        strlen((char *)e->data.scalar.value) != e->data.scalar.length)
        return fail_here(reader, "a NUL in the text");
    return DPL_OK;
}

// The text of a scalar event; NULL after wording the error.
static const char *scalar_text(const yaml_reader *reader) {
    if (reader->event.type == YAML_SCALAR_EVENT) return (char *)reader->event.data.scalar.value;
    (void)fail_here(reader, "expected a plain value");
    return NULL;
}

static bool is_null(const yaml_reader *reader, const char *text) {
    return reader->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (!*text || !strcmp(text, "~") || !strcasecmp(text, "null"));
}

static json_t *scalar_json(const yaml_reader *reader, const char *text) {
    int64_t integer;
    double real;
    if (reader->event.data.scalar.style != YAML_PLAIN_SCALAR_STYLE) return json_string(text);
    if (is_null(reader, text)) return json_null();
    if (!strcasecmp(text, "true")) return json_true();
    if (!strcasecmp(text, "false")) return json_false();
    if (dpl_parse_i64(text, &integer) == DPL_OK) return json_integer(integer);
    if (dpl_parse_f64(text, &real) == DPL_OK) return json_real(real);
    return json_string(text);
}

// Appends what stands between a sequence's start event and its end event.
static dpl_status read_sequence(yaml_reader *reader, int depth, json_t *array) {
    if (depth > YAML_DEPTH_MAX) return fail_here(reader, "lists are nested too deep");
    for (;;) {
        DPL_TRY(next_event(reader));
        if (reader->event.type == YAML_SEQUENCE_END_EVENT) return DPL_OK;
        const bool nested = reader->event.type == YAML_SEQUENCE_START_EVENT;
        const char *text = nested ? "" : scalar_text(reader);
        if (!text) return DPL_EFORMAT;
        json_t *item = nested ? json_array() : scalar_json(reader, text);
        if (json_array_append_new(array, item) != 0) return fail_memory(reader);
        if (nested) DPL_TRY(read_sequence(reader, depth + 1, item));
    }
}

// Hands key and value to the caller; the current event is the value's first.
static dpl_status read_value(yaml_reader *reader, const char *key, int line) {
    const char *text = NULL;
    char *json_text = NULL;
    if (reader->event.type == YAML_MAPPING_START_EVENT)
        return fail_here(reader, "a mapping inside the mapping; keys must be flat");
    if (reader->event.type == YAML_SEQUENCE_START_EVENT) {
        json_t *array = json_array();
        dpl_status status = array ? read_sequence(reader, 1, array) : fail_memory(reader);
        if (status == DPL_OK && !(text = json_text = json_dumps(array, 0)))
            status = fail_memory(reader);
        json_decref(array);
        DPL_TRY(status);
    } else {
        if (!(text = scalar_text(reader))) return DPL_EFORMAT;
        if (is_null(reader, text)) text = "";
    }
    const dpl_status status = reader->fn(reader->arg, key, text, line);
    free(json_text);
    return status == DPL_OK ? status : dpl_fail_in(status, "%s:%d", reader->path, line);
}

static dpl_status read_mapping(yaml_reader *reader) {
    for (;;) {
        DPL_TRY(next_event(reader));
        if (reader->event.type == YAML_MAPPING_END_EVENT) return DPL_OK;
        const char *text = scalar_text(reader);
        if (!text) return DPL_EFORMAT;
        const int line = event_line(reader);
        const json_t *earlier = json_object_get(reader->seen, text);
        if (earlier)
            return dpl_fail(DPL_EFORMAT, "%s:%d: the key '%s' stands on line %lld already",
                            reader->path, line, text, (long long)json_integer_value(earlier));
        if (json_object_set_new(reader->seen, text, json_integer(line)) != 0)
            return fail_memory(reader);
        // The object's copy of the key lives on when the event goes.
        const char *key = json_object_iter_key(json_object_iter_at(reader->seen, text));
        DPL_TRY(next_event(reader));
        DPL_TRY(read_value(reader, key, line));
    }
}

static dpl_status read_document(yaml_reader *reader) {
    DPL_TRY(next_event(reader)); // stream start
    DPL_TRY(next_event(reader));
    if (reader->event.type == YAML_STREAM_END_EVENT) return DPL_OK; // Nothing but comments.
    DPL_TRY(next_event(reader));
    if (reader->event.type == YAML_MAPPING_START_EVENT) DPL_TRY(read_mapping(reader));
    else if (reader->event.type != YAML_SCALAR_EVENT || reader->event.data.scalar.length > 0)
        return fail_here(reader, "expected lines of the form 'key: value'");
    DPL_TRY(next_event(reader)); // document end
    DPL_TRY(next_event(reader));
    if (reader->event.type != YAML_STREAM_END_EVENT) return fail_here(reader, "a second document");
    return DPL_OK;
}

dpl_status dpl_yaml_read(const char *path, dpl_yaml_fn fn, void *arg) {
    dpl_map map;
    DPL_TRY(dpl_map_open(path, &map));
    yaml_reader reader = {.path = path, .fn = fn, .arg = arg};
    dpl_status status;
    if (map.bytes > YAML_BYTES_MAX) {
        status = dpl_fail(DPL_EFORMAT, "%s: %zu bytes; a configuration has at most %zu", path,
                          map.bytes, YAML_BYTES_MAX);
    } else if (!(reader.seen = json_object()) || !yaml_parser_initialize(&reader.parser)) {
        status = fail_memory(&reader);
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
