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
    json_t *seen; // key -> line; owns the keys
    dpl_yaml_fn fn;
    void *arg;
    bool in_document, in_mapping;
    const char *key; // whose value is next; NULL: a key is
    int line;        // the key's
    json_t *lists[YAML_DEPTH_MAX];
    size_t depth; // of the current list; 0: none
} yaml_reader;

static dpl_status fail_here(const yaml_reader *r, const char *what) {
    return dpl_fail(DPL_EFORMAT, "%s:%zu: %s", r->path, r->event.start_mark.line + 1, what);
}

static dpl_status fail_memory(const yaml_reader *r) {
    return dpl_fail(DPL_ENOMEM, "no memory to read %s", r->path);
}

// Moves to the next event, which is none that would be more than plain text and lists.
static dpl_status next_event(yaml_reader *r) {
    const yaml_parser_t *p = &r->parser;
    const yaml_event_t *e = &r->event;
    yaml_event_delete(&r->event);
    if (!yaml_parser_parse(&r->parser, &r->event)) {
        if (p->error == YAML_MEMORY_ERROR) return fail_memory(r);
        if (p->error == YAML_READER_ERROR)
            return dpl_fail(DPL_EFORMAT, "%s: byte %zu: %s", r->path, p->problem_offset,
                            p->problem);
        return dpl_fail(DPL_EFORMAT, "%s:%zu: %s", r->path, p->problem_mark.line + 1,
                        p->problem ? p->problem : "not YAML");
    }
    if (e->type == YAML_ALIAS_EVENT) return fail_here(r, "aliases are not supported");
    if (e->type != YAML_SCALAR_EVENT && e->type != YAML_SEQUENCE_START_EVENT &&
        e->type != YAML_MAPPING_START_EVENT)
        return DPL_OK;
    // The data of these three begin alike.
    if (e->data.scalar.anchor) return fail_here(r, "anchors are not supported");
    if (e->data.scalar.tag) return fail_here(r, "tags are not supported");
    return DPL_OK;
}

static bool is_null(const yaml_reader *r, const char *text) {
    return r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (!*text || !strcmp(text, "~") || !strcasecmp(text, "null"));
}

static json_t *scalar_json(const yaml_reader *r, const char *text) {
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

// Hands the key and its value to the caller.
static dpl_status give_value(yaml_reader *r, const char *text) {
    const dpl_status status = r->fn(r->arg, r->key, text, r->line);
    r->key = NULL;
    return status == DPL_OK ? status : dpl_fail_in(status, "%s:%d", r->path, r->line);
}

static dpl_status take_key(yaml_reader *r, const char *text) {
    r->line = (int)r->event.start_mark.line + 1;
    const json_t *earlier = json_object_get(r->seen, text);
    if (earlier)
        return dpl_fail(DPL_EFORMAT, "%s:%d: the key '%s' stands on line %lld already", r->path,
                        r->line, text, (long long)json_integer_value(earlier));
    if (json_object_set_new(r->seen, text, json_integer(r->line)) != 0) return fail_memory(r);
    r->key = json_object_iter_key(json_object_iter_at(r->seen, text));
    return DPL_OK;
}

static dpl_status take_scalar(yaml_reader *r) {
    const char *text = (char *)r->event.data.scalar.value;
    if (strlen(text) != r->event.data.scalar.length) return fail_here(r, "a NUL in the text");
    if (!r->in_mapping && !*text) return DPL_OK; // an empty document
    if (!r->in_mapping) return fail_here(r, "expected lines of the form 'key: value'");
    if (!r->key) return take_key(r, text);
    if (r->depth == 0) return give_value(r, is_null(r, text) ? "" : text);
    const int rc = json_array_append_new(r->lists[r->depth - 1], scalar_json(r, text));
    return rc == 0 ? DPL_OK : fail_memory(r);
}

static dpl_status open_list(yaml_reader *r) {
    if (!r->in_mapping) return fail_here(r, "expected lines of the form 'key: value'");
    if (!r->key) return fail_here(r, "expected a plain value");
    if (r->depth == YAML_DEPTH_MAX) return fail_here(r, "lists are nested too deep");
    json_t *list = json_array();
    if (!list || (r->depth && json_array_append_new(r->lists[r->depth - 1], list) != 0))
        return fail_memory(r);
    r->lists[r->depth++] = list; // The outermost list owns the others.
    return DPL_OK;
}

static dpl_status close_list(yaml_reader *r) {
    if (--r->depth > 0) return DPL_OK;
    char *text = json_dumps(r->lists[0], 0);
    const dpl_status status = text ? give_value(r, text) : fail_memory(r);
    free(text);
    json_decref(r->lists[0]);
    return status;
}

static dpl_status take_event(yaml_reader *r) {
    const yaml_event_type_t type = r->event.type;
    if (type == YAML_SCALAR_EVENT) return take_scalar(r);
    if (type == YAML_SEQUENCE_START_EVENT) return open_list(r);
    if (type == YAML_SEQUENCE_END_EVENT) return close_list(r);
    if (type == YAML_DOCUMENT_START_EVENT && r->in_document)
        return fail_here(r, "a second document");
    if (type == YAML_MAPPING_START_EVENT && r->in_mapping)
        return fail_here(r, r->key && r->depth == 0
                                ? "a mapping inside the mapping; keys must be flat"
                                : "expected a plain value");
    r->in_document |= type == YAML_DOCUMENT_START_EVENT;
    r->in_mapping |= type == YAML_MAPPING_START_EVENT;
    return DPL_OK;
}

dpl_status dpl_yaml_read(const char *path, dpl_yaml_fn fn, void *arg) {
    dpl_map map;
    DPL_TRY(dpl_map_open(path, &map));
    yaml_reader r = {.path = path, .fn = fn, .arg = arg};
    dpl_status status = DPL_OK;
    if (map.bytes > YAML_BYTES_MAX) {
        status = dpl_fail(DPL_EFORMAT, "%s: %zu bytes; a configuration has at most %zu", path,
                          map.bytes, YAML_BYTES_MAX);
    } else if (!(r.seen = json_object()) || !yaml_parser_initialize(&r.parser)) {
        status = fail_memory(&r);
    } else {
        yaml_parser_set_input_string(&r.parser, map.data, map.bytes);
        while (status == DPL_OK && r.event.type != YAML_STREAM_END_EVENT)
            if ((status = next_event(&r)) == DPL_OK) status = take_event(&r);
        if (r.depth > 0) json_decref(r.lists[0]);
        yaml_event_delete(&r.event);
        yaml_parser_delete(&r.parser);
    }
    json_decref(r.seen);
    dpl_map_close(&map);
    return status;
}
