// text_formats.c - JSON objects, flat YAML mappings and numbers in text.
//
// The libraries parse; here their habits are narrowed to what a configuration may be, and every
// error gets the file and line. Numbers are ours because a library's idea of one depends on the
// process's locale (0,1) or on YAML 1.1 (2e-5 is a string there).
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
    DPL_EXPECT(json, DPL_EFORMAT, "%s: line %d, byte %d: %s", path, error.line, error.position,
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
#define EXPECT(condition, what) DPL_EXPECT(condition, DPL_EFORMAT, what)

typedef struct yaml_reader {
    yaml_parser_t parser;
    yaml_event_t event; // the current one
    int line;           // where an error would be; 0: not known
    json_t *lines;      // key -> line; owns the keys
    json_t *list;       // the current value, if it is one
    dpl_yaml_fn fn;
    void *arg;
} yaml_reader;

static dpl_status fail_memory(void) {
    return dpl_fail(DPL_ENOMEM, "no memory to read it");
}

// Moves to the next event, which is none that would be more than plain text and lists.
static dpl_status next_event(yaml_reader *r) {
    const yaml_parser_t *p = &r->parser;
    const yaml_event_t *e = &r->event;
    yaml_event_delete(&r->event);
    if (!yaml_parser_parse(&r->parser, &r->event)) {
        r->line = p->error == YAML_READER_ERROR ? 0 : (int)p->problem_mark.line + 1;
        if (p->error == YAML_MEMORY_ERROR) return fail_memory();
        DPL_EXPECT(r->line > 0, DPL_EFORMAT, "byte %zu: %s", p->problem_offset, p->problem);
        return dpl_fail(DPL_EFORMAT, "%s", p->problem);
    }
    r->line = (int)e->start_mark.line + 1;
    const bool scalar = e->type == YAML_SCALAR_EVENT;
    EXPECT(e->type != YAML_ALIAS_EVENT, "aliases are not supported");
    if (scalar || e->type == YAML_SEQUENCE_START_EVENT || e->type == YAML_MAPPING_START_EVENT) {
        // The data of these three begin alike.
        EXPECT(!e->data.scalar.anchor, "anchors are not supported");
        EXPECT(!e->data.scalar.tag, "tags are not supported");
    }
    DPL_EXPECT(!scalar || strlen((char *)e->data.scalar.value) == e->data.scalar.length,
               DPL_EFORMAT, "a NUL in the text");
    return DPL_OK;
}

static bool is_null(const yaml_reader *r, const char *text) {
    return r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (!*text || !strcmp(text, "~") || !strcasecmp(text, "null"));
}

static json_t *scalar_json(const yaml_reader *r) {
    const char *text = (char *)r->event.data.scalar.value;
    int64_t integer;
    double real;
    if (r->event.data.scalar.style != YAML_PLAIN_SCALAR_STYLE) return json_string(text);
    if (is_null(r, text)) return json_null();
    if (!strcasecmp(text, "true")) return json_true();
    if (!strcasecmp(text, "false")) return json_false();
    if (dpl_parse_i64(text, &integer) == DPL_OK) return json_integer(integer);
    if (dpl_parse_f64(text, &real) == DPL_OK) return json_real(real);
    return json_string(text);
}

// Appends the values of the list that begins, up to its end.
static dpl_status read_list(yaml_reader *r, size_t depth, json_t *list) {
    EXPECT(depth < YAML_DEPTH_MAX, "lists are nested too deep");
    for (;;) {
        DPL_TRY(next_event(r));
        const bool is_list = r->event.type == YAML_SEQUENCE_START_EVENT;
        if (r->event.type == YAML_SEQUENCE_END_EVENT) return DPL_OK;
        EXPECT(is_list || r->event.type == YAML_SCALAR_EVENT, "expected a plain value");
        json_t *value = is_list ? json_array() : scalar_json(r);
        if (json_array_append_new(list, value) != 0) return fail_memory();
        if (is_list) DPL_TRY(read_list(r, depth + 1, value));
    }
}

static dpl_status read_value(yaml_reader *r, const char *key, int line) {
    DPL_TRY(next_event(r));
    const char *plain = (char *)r->event.data.scalar.value;
    const bool is_list = r->event.type == YAML_SEQUENCE_START_EVENT;
    EXPECT(is_list || r->event.type == YAML_SCALAR_EVENT,
           "a mapping inside the mapping; keys must be flat");
    json_array_clear(r->list);
    if (is_list) DPL_TRY(read_list(r, 0, r->list));
    char *text = is_list ? json_dumps(r->list, 0) : strdup(is_null(r, plain) ? "" : plain);
    if (!text) return fail_memory();
    r->line = line;
    const dpl_status status = r->fn(r->arg, key, text, line);
    free(text);
    return status;
}

static dpl_status read_pairs(yaml_reader *r) {
    for (;;) {
        DPL_TRY(next_event(r));
        if (r->event.type == YAML_MAPPING_END_EVENT) return DPL_OK;
        EXPECT(r->event.type == YAML_SCALAR_EVENT, "expected a plain value");
        const char *key = (char *)r->event.data.scalar.value;
        const int line = r->line;
        const json_t *earlier = json_object_get(r->lines, key);
        DPL_EXPECT(!earlier, DPL_EFORMAT, "the key '%s' stands on line %lld already", key,
                   (long long)json_integer_value(earlier));
        if (json_object_set_new(r->lines, key, json_integer(line)) != 0) return fail_memory();
        DPL_TRY(read_value(r, json_object_iter_key(json_object_iter_at(r->lines, key)), line));
    }
}

static dpl_status read_stream(yaml_reader *r) {
    do DPL_TRY(next_event(r));
    while (r->event.type == YAML_STREAM_START_EVENT || r->event.type == YAML_DOCUMENT_START_EVENT);
    const bool scalar = r->event.type == YAML_SCALAR_EVENT;
    if (r->event.type == YAML_STREAM_END_EVENT) return DPL_OK;
    if (r->event.type == YAML_MAPPING_START_EVENT) DPL_TRY(read_pairs(r));
    else // An empty document is one empty text.
        EXPECT(scalar && r->event.data.scalar.length == 0,
               "expected lines of the form 'key: value'");
    DPL_TRY(next_event(r)); // the document's end
    DPL_TRY(next_event(r)); // the stream's
    EXPECT(r->event.type == YAML_STREAM_END_EVENT, "a second document");
    return DPL_OK;
}

dpl_status dpl_yaml_read(const char *path, dpl_yaml_fn fn, void *arg) {
    dpl_map map;
    DPL_TRY(dpl_map_open(path, &map));
    yaml_reader r = {.lines = json_object(), .list = json_array(), .fn = fn, .arg = arg};
    dpl_status status;
    if (map.bytes > YAML_BYTES_MAX) {
        status = dpl_fail(DPL_EFORMAT, "%zu bytes; a configuration has at most %zu", map.bytes,
                          YAML_BYTES_MAX);
    } else if (!r.lines || !r.list || !yaml_parser_initialize(&r.parser)) {
        status = fail_memory();
    } else {
        yaml_parser_set_input_string(&r.parser, map.data, map.bytes);
        status = read_stream(&r);
    }
    yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
    json_decref(r.lines);
    json_decref(r.list);
    dpl_map_close(&map);
    if (status == DPL_OK) return DPL_OK;
    return r.line > 0 ? dpl_fail_in(status, "%s:%d", path, r.line)
                      : dpl_fail_in(status, "%s", path);
}
