/*
 * test_safetensors.c - safetensors files, and model directories of one file or of shards.
 *
 * Damaged files are written byte by byte here, and each must give an error with the file's name
 * and the place. The reader is compared with the tests' own one on all reference models.
 */
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "fixture.h"
#include "io/io.h"
#include "scratch.h"

static const char *write_raw(uint64_t header_bytes, const char *header, size_t data_bytes) {
    static uint8_t bytes[1 << 16];
    const size_t n = strlen(header);
    memcpy(bytes, &header_bytes, 8);
    memcpy(bytes + 8, header, n);
    memset(bytes + 8 + n, 1, data_bytes);
    const char *path = scratch_path("t.safetensors");
    scratch_write(path, bytes, 8 + n + data_bytes);
    return path;
}

static dpl_status open_raw(uint64_t header_bytes, const char *header, size_t data_bytes) {
    dpl_st_file *file = NULL;
    const dpl_status status = dpl_st_open(write_raw(header_bytes, header, data_bytes), &file);
    if (status != DPL_OK) assert_null(file);
    dpl_st_close(&file);
    return status;
}

static void hostile_headers(void **state) {
    (void)state;
#define F32(name, shape, offsets) \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *part, *part2;
    } cases[] = {
        {"{" F32("a", "[2]", "[8,0]") "}", 8, "byte 9: tensor a", "backwards"},
        {"{" F32("a", "[2]", "[0,8]") "," F32("b", "[2]", "[4,12]") "}", 12, "tensor b overlaps",
         ""},
        {"{" F32("a", "[2]", "[0,8]") "," F32("b", "[2]", "[0,8]") "}", 8, "tensor b overlaps", ""},
        {"{" F32("a", "[2]", "[0,8]") "," F32("b", "[1]", "[12,16]") "}", 16, "tensor b has a hole",
         ""},
        {"{" F32("a", "[2]", "[4,12]") "}", 12, "tensor a has a hole", ""},
        {"{" F32("a", "[3]", "[0,8]") "}", 8, "byte 9: tensor a", "do not match"},
        {"{" F32("a", "[2]", "[0,8]") "}", 7, "byte 9: tensor a", "beyond the end"},
        {"{" F32("a", "[2]", "[0,8]") "}", 9, "1 bytes that belong to no tensor", ""},
        {"{}", 3, "byte 10: 3 bytes", ""},
        {"{" F32("\xff", "[2]", "[0,8]") "}", 8, "byte 10: header: ", "byte 0xff"},
        {"{" F32("a", "[2]", "[0,8]") "," F32("a", "[2]", "[8,16]") "}", 16, "byte", "duplicate"},
        {"{" F32("a", "[8589934592,8589934592]", "[0,8]") "}", 8, "tensor a", "overflows"},
        {"{" F32("a", "[4611686018427387904]", "[0,0]") "}", 0, "tensor a", "overflows"},
        {"{" F32("a", "[8589934592,8589934592,0]", "[0,0]") "}", 0, "tensor a", "overflows"},
        {"{" F32("a", "[-1,-2]", "[0,8]") "}", 8, "tensor a", "dimension"},
        {"{" F32("a", "[2.0]", "[0,8]") "}", 8, "tensor a", "dimension"},
        {"{" F32("a", "[18446744073709551616]", "[0,8]") "}", 8, "byte", "big"},
        {"{" F32("a", "[1,1,1,1,1,1,1,1,2]", "[0,8]") "}", 8, "tensor a", "dimensions"},
        {"{" F32("a", "2", "[0,8]") "}", 8, "tensor a", "no shape"},
        {"{" F32("a", "[2]", "[0]") "}", 8, "tensor a", "no data_offsets"},
        {"{" F32("a", "[2]", "[0,8,8]") "}", 8, "tensor a", "no data_offsets"},
        {"{" F32("a", "[2]", "[-8,0]") "}", 8, "tensor a", "no data_offsets"},
        {"{" F32("a", "[2]", "[0,\"8\"]") "}", 8, "tensor a", "no data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "tensor a", "no data_offsets"},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "tensor a", "no dtype"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "tensor a",
         "dtype"},
        {"{\"a\":[1]}", 8, "byte 9: tensor a", "no dtype"},
        {"{\"a\\u0001\":null}", 0, "byte 8: tensor a", "no dtype"},
        {"{\"\":null}", 0, "byte 9: tensor ", "no dtype"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "byte 9: __metadata__", ""},
        {"{\"__metadata__\":[]}", 0, "byte 9: __metadata__", ""},
        {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "byte", "duplicate"},
        {" {}", 0, "byte 8: ", ""},
        {"[]", 0, "byte 8: ", ""},
        {"{\"a\\u0000\":1}", 0, "byte", ""},
        {"{} {}", 0, "byte", ""},
        {"{\"a\":", 0, "byte", ""},
        {"{},\"__metadata__\":{}", 0, "byte", ""},
    };
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        const dpl_status status = open_raw(strlen(cases[i].header), cases[i].header,
                                           cases[i].data_bytes);
        check_error(status, DPL_EFORMAT, "/t.safetensors: ", cases[i].part);
        check_error(status, DPL_EFORMAT, cases[i].part, cases[i].part2);
    }
    check_ok(open_raw(15, "{}             ", 0)); // spaces fill up
    check_ok(open_raw(2, "{}", 0));
    check_ok(open_raw(strlen("{" F32("a", "[0,9]", "[0,0]") "," F32("b", "[]", "[0,4]") "}"),
                      "{" F32("a", "[0,9]", "[0,0]") "," F32("b", "[]", "[0,4]") "}", 4));
}

static void hostile_sizes(void **state) {
    (void)state;
    static const uint64_t sizes[] = {
        0, 1, 3, 100000001, (uint64_t)1 << 63, UINT64_MAX, INT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < DPL_COUNT(sizes); i++)
        check_error(open_raw(sizes[i], "{}", 0), DPL_EFORMAT, "t.safetensors: byte 0:", "header");
    // A header of 100 MB and one byte that is there, in a sparse file.
    const char *path = write_raw(100000001, "{}", 0);
    assert_int_equal(truncate(path, 200000000), 0);
    dpl_st_file *file = NULL;
    check_error(dpl_st_open(path, &file), DPL_EFORMAT, "t.safetensors: byte 0:", "100000001");
    for (size_t bytes = 0; bytes < 8; bytes++) {
        assert_int_equal(truncate(path, (off_t)bytes), 0);
        check_error(dpl_st_open(path, &file), DPL_EFORMAT,
                    "t.safetensors: byte 0:", "header of 0 bytes");
    }
    check_error(dpl_st_open(scratch_path("none"), &file), DPL_EIO, "/none", "");
    assert_null(file);
}

// Every proper beginning of a good file is an error, and so is every longer file.
static void truncated(void **state) {
    (void)state;
    static const char header[] = "{" F32("a", "[2]", "[0,8]") "}  ";
    for (size_t cut = 0;; cut++) {
        char path[PATH_MAX];
        strcpy(path, write_raw(sizeof header - 1, header, 8));
        const size_t whole = 8 + sizeof header - 1 + 8;
        dpl_st_file *file = NULL;
        assert_int_equal(truncate(path, (off_t)cut), 0);
        const dpl_status status = dpl_st_open(path, &file);
        dpl_st_close(&file);
        if (cut == whole) check_ok(status);
        else check_error(status, DPL_EFORMAT, "t.safetensors: byte", "");
        if (cut > whole) break;
    }
}

/* ---- values --------------------------------------------------------------------------------- */

static void half_values(void **state) {
    (void)state;
    static uint16_t codes[65536];
    static float values[65536];
    for (size_t i = 0; i < 65536; i++) codes[i] = (uint16_t)i;
    const dpl_st_tensor tensor = {.name = "h",
                                  .dtype = DPL_ST_F16,
                                  .rank = 1,
                                  .shape = {65536},
                                  .data = (const uint8_t *)codes,
                                  .bytes = sizeof codes};
    check_ok(dpl_st_read_f32(&tensor, values));
    for (int i = 0; i < 65536; i++) {
        const int exponent = i >> 10 & 31, mantissa = i & 1023;
        double want = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
        if (exponent == 31) want = mantissa ? NAN : INFINITY;
        if (i >> 15) want = -want;
        const double got = (double)values[i];
        if (isnan(want) ? !isnan(got) : got != want || !signbit(got) != !signbit(want))
            fail_msg("0x%04x gave %.9g, expected %.9g", (unsigned)i, got, want);
    }
}

static void all_dtypes(void **state) {
    (void)state;
    const double f64[] = {1.5, -0.0, 0.1};
    const float f32[] = {3.25f, -0.0f, 1e-45f};
    const uint16_t bf16[] = {0x3fc0, 0x8000, 0xff80};
    const int8_t i8[] = {-128, 127, 0};
    const uint8_t u8[] = {255, 0, 1};
    const int16_t i16[] = {INT16_MIN, INT16_MAX, 1};
    const uint16_t u16[] = {65535, 0, 1};
    const int32_t i32[] = {INT32_MIN, INT32_MAX, 1};
    const uint32_t u32[] = {UINT32_MAX, 0, 1};
    const int64_t i64[] = {INT64_MIN, INT64_MAX, 1};
    const uint64_t u64[] = {INT64_MAX, 0, 1}, big[] = {0, 1, (uint64_t)1 << 63};
    const struct {
        dpl_st_dtype dtype;
        const void *data;
        double want[3];
        int64_t want_int[3];
    } cases[] = {
        {DPL_ST_F64, f64, {1.5, -0.0, 0.1f}, {0}},
        {DPL_ST_F32, f32, {3.25, -0.0, 1e-45f}, {0}},
        {DPL_ST_BF16, bf16, {1.5, -0.0, -INFINITY}, {0}},
        {DPL_ST_BOOL, u8 + 0, {NAN}, {255, 0, 1}},
        {DPL_ST_I8, i8, {NAN}, {-128, 127, 0}},
        {DPL_ST_U8, u8, {NAN}, {255, 0, 1}},
        {DPL_ST_I16, i16, {NAN}, {INT16_MIN, INT16_MAX, 1}},
        {DPL_ST_U16, u16, {NAN}, {65535, 0, 1}},
        {DPL_ST_I32, i32, {NAN}, {INT32_MIN, INT32_MAX, 1}},
        {DPL_ST_U32, u32, {NAN}, {UINT32_MAX, 0, 1}},
        {DPL_ST_I64, i64, {NAN}, {INT64_MIN, INT64_MAX, 1}},
        {DPL_ST_U64, u64, {NAN}, {INT64_MAX, 0, 1}},
    };
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        const size_t width = dpl_st_dtype_bytes(cases[i].dtype);
        uint8_t odd[32]; // data at an odd address
        memcpy(odd + 1, cases[i].data, 3 * width);
        const dpl_st_tensor tensor = {.name = "t",
                                      .file = "f",
                                      .dtype = cases[i].dtype,
                                      .rank = 1,
                                      .shape = {3},
                                      .data = odd + 1,
                                      .bytes = 3 * width};
        float f[3];
        int32_t n[3];
        if (isnan(cases[i].want[0])) {
            check_error(dpl_st_read_f32(&tensor, f), DPL_EFORMAT, "tensor t", "F32");
            const int64_t *want = cases[i].want_int;
            const int64_t low = DPL_MIN(DPL_MIN(want[0], want[1]), want[2]);
            const int64_t high = DPL_MAX(DPL_MAX(want[0], want[1]), want[2]);
            check_ok(dpl_st_read_i32(&tensor, low, high, n));
            for (int j = 0; j < 3; j++)
                if (want[j] <= INT32_MAX) assert_int_equal(n[j], DPL_MAX(want[j], INT32_MIN));
            check_error(dpl_st_read_i32(&tensor, low + 1, high, n), DPL_EFORMAT, "f: t[", "] is");
            check_error(dpl_st_read_i32(&tensor, low, high - 1, n), DPL_EFORMAT, "f: t[", "] is");
        } else {
            check_error(dpl_st_read_i32(&tensor, 0, 1, n), DPL_EFORMAT, "f: tensor t", "integers");
            check_ok(dpl_st_read_f32(&tensor, f));
            for (int j = 0; j < 3; j++) {
                const float want = (float)cases[i].want[j];
                assert_memory_equal(&f[j], &want, 4);
            }
        }
    }
    const dpl_st_tensor tensor = {.name = "t",
                                  .file = "f",
                                  .dtype = DPL_ST_U64,
                                  .rank = 1,
                                  .shape = {3},
                                  .data = (const uint8_t *)big,
                                  .bytes = sizeof big};
    int32_t n[3];
    check_error(dpl_st_read_i32(&tensor, 0, INT32_MAX, n), DPL_EFORMAT, "f: t[2] is", "");
    const dpl_st_tensor fp8 = {.name = "t",
                               .file = "f",
                               .dtype = DPL_ST_F8_E4M3,
                               .rank = 1,
                               .shape = {3},
                               .data = u8,
                               .bytes = 3};
    check_error(dpl_st_read_i32(&fp8, 0, 1, n), DPL_EFORMAT, "F8_E4M3", "");
    check_error(dpl_st_read_f32(&fp8, (float[3]){0}), DPL_EFORMAT, "F8_E4M3", "");
}

/* ---- writing one file ----------------------------------------------------------------------- */

// expected NULL: the file's header has no such key.
static void check_metadata(const char *path, const char *key, const char *expected) {
    dpl_map map;
    uint64_t bytes;
    check_ok(dpl_map_open(path, &map));
    memcpy(&bytes, map.data, 8);
    json_t *header = json_loadb((const char *)map.data + 8, bytes, 0, NULL);
    assert_non_null(header);
    const json_t *value = json_object_get(json_object_get(header, "__metadata__"), key);
    assert_int_equal(value != NULL, expected != NULL);
    if (expected) assert_string_equal(json_string_value(value), expected);
    json_decref(header);
    dpl_map_close(&map);
}

static void round_trip(void **state) {
    (void)state;
    const uint64_t seed = (uint64_t)(dpl_now() * 1e6);
    print_message("seed %llu\n", (unsigned long long)seed);
    dpl_st_tensor tensors[DPL_ST_N + 2];
    char names[DPL_ST_N + 2][24];
    uint8_t data[DPL_ST_N + 2][600];
    for (size_t i = 0; i < DPL_COUNT(tensors); i++) {
        snprintf(names[i], sizeof names[i], "%s\xc3\xa9.\"\\\n%zu", i % 2 ? "a" : "z", i);
        tensors[i] = (dpl_st_tensor){
            .name = names[i], .dtype = (dpl_st_dtype)(i % DPL_ST_N), .rank = (int)(i % 4)};
        for (int j = 0; j < tensors[i].rank; j++) // sizes 0 to 3
            tensors[i].shape[j] = (int64_t)(dpl_rng_u64(seed, i, (uint64_t)j) % 4);
        for (size_t j = 0; j < sizeof data[i]; j++)
            data[i][j] = (uint8_t)dpl_rng_u64(seed, 1000 + i, j);
    }
    char path[PATH_MAX];
    strcpy(path, scratch_path("round.safetensors"));
    for (size_t i = 0; i < DPL_COUNT(tensors); i++) tensors[i].data = data[i];
    check_ok(dpl_st_write(path, tensors, DPL_COUNT(tensors), NULL, NULL));
    dpl_st_file *file;
    check_ok(dpl_st_open(path, &file));
    assert_string_equal(file->path, path);
    assert_int_equal(file->n_tensors, DPL_COUNT(tensors));
    check_metadata(file->path, "format", "pt");
    check_metadata(file->path, "none", NULL);
    assert_null(dpl_st_find(file, "none"));
    for (size_t i = 0; i < DPL_COUNT(tensors); i++) {
        const dpl_st_tensor *got = dpl_st_find(file, names[i]);
        assert_non_null(got);
        assert_int_equal(got->dtype, tensors[i].dtype);
        assert_int_equal(got->rank, tensors[i].rank);
        assert_memory_equal(got->shape, tensors[i].shape, sizeof got->shape);
        assert_int_equal(got->bytes, dpl_st_elems(got) * dpl_st_dtype_bytes(got->dtype));
        assert_memory_equal(got->data, data[i], got->bytes);
        if (i > 0) assert_true(strcmp(file->tensors[i - 1].name, file->tensors[i].name) < 0);
    }
    dpl_st_close(&file);
    assert_null(file);
    dpl_st_close(&file);
    dpl_st_close(NULL);
}

static void no_tensors(void **state) {
    (void)state;
    const char *path = scratch_path("zero.safetensors");
    check_ok(dpl_st_write(path, NULL, 0, NULL, NULL));
    static const char whole[] = "\x20\0\0\0\0\0\0\0{\"__metadata__\":{\"format\":\"pt\"}}";
    assert_true(scratch_holds(path, whole, sizeof whole - 1));
    dpl_st_file *file;
    check_ok(dpl_st_open(path, &file));
    assert_int_equal(file->n_tensors, 0);
    check_metadata(file->path, "format", "pt");
    dpl_st_close(&file);
    check_ok(dpl_write_file(path, "\x08\0\0\0\0\0\0\0{}      ", 16));
    check_ok(dpl_st_open(path, &file));
    check_metadata(file->path, "a", NULL);
    assert_null(dpl_st_find(file, ""));
    dpl_st_close(&file);
}

static void writer_errors(void **state) {
    (void)state;
    check_ok(dpl_make_dirs(scratch_path("we")));
    char path[PATH_MAX];
    strcpy(path, scratch_path("we/w.safetensors"));
    const dpl_st_tensor good = {.name = "a", .dtype = DPL_ST_F32, .rank = 1, .shape = {2}};
    dpl_st_tensor list[2] = {good, good};
    check_error(dpl_st_write(path, list, 2, NULL, NULL), DPL_EINVAL, path, "a is taken");
    list[1].name = "__metadata__";
    check_error(dpl_st_write(path, list, 2, NULL, NULL), DPL_EINVAL, path, "taken");
    list[1].name = "\xff";
    check_error(dpl_st_write(path, list, 2, NULL, NULL), DPL_EINVAL, path, "UTF-8");
    list[1] = (dpl_st_tensor){.name = "b", .dtype = DPL_ST_F32, .rank = 9};
    check_error(dpl_st_write(path, list, 2, NULL, NULL), DPL_EINVAL, path, "tensor b");
    list[1] = (dpl_st_tensor){.name = "b", .dtype = DPL_ST_N};
    check_error(dpl_st_write(path, list, 2, NULL, NULL), DPL_EINVAL, path, "tensor b");
    list[1] = (dpl_st_tensor){.name = "b", .dtype = DPL_ST_U8, .rank = 1, .shape = {-1}};
    check_error(dpl_st_write(path, list, 2, NULL, NULL), DPL_EINVAL, path, "tensor b");
    list[1] = (dpl_st_tensor){.name = "b", .dtype = DPL_ST_U8, .rank = 1, .shape = {INT64_MAX}};
    check_error(dpl_st_write(path, list, 2, NULL, NULL), DPL_EINVAL, path, "tensor b");
    assert_int_equal(scratch_count(scratch_path("we")), 0);
}

static dpl_status write_one(const char *path, const char *bytes) {
    const dpl_st_tensor tensor = {
        .name = "a", .dtype = DPL_ST_F32, .rank = 1, .shape = {2}, .data = (const uint8_t *)bytes};
    return dpl_st_write(path, &tensor, 1, NULL, NULL);
}

static bool one_holds(const char *path, const char *bytes) {
    dpl_st_file *file;
    if (dpl_st_open(path, &file) != DPL_OK) return false;
    const bool same = !memcmp(dpl_st_find(file, "a")->data, bytes, 8);
    dpl_st_close(&file);
    return same;
}

static void writer_faults(void **state) {
    (void)state;
    check_ok(dpl_make_dirs(scratch_path("wf")));
    char path[PATH_MAX];
    strcpy(path, scratch_path("wf/w.safetensors"));
    for (int kind = 0; kind < 2; kind++) {
        void (*inject)(size_t) = kind ? dpl_fault_alloc : dpl_fault_write;
        size_t n = 0;
        for (dpl_status status = DPL_EIO; status != DPL_OK;) {
            check_ok(write_one(path, "oldbytes"));
            inject(++n);
            status = write_one(path, "newbytes");
            inject(0);
            assert_true(one_holds(path, "newbytes") ||
                        (status != DPL_OK && one_holds(path, "oldbytes")));
            assert_int_equal(scratch_count(scratch_path("wf")), 1);
        }
        assert_true(n > (kind ? 1 : 3));
    }
    for (size_t n = 1;; n++) { // the reader's memory
        dpl_st_file *file = NULL;
        dpl_fault_alloc(n);
        const dpl_status status = dpl_st_open(path, &file);
        dpl_fault_alloc(0);
        dpl_st_close(&file);
        if (status == DPL_OK) break;
        check_error(status, DPL_ENOMEM, path, "");
    }
}

/* ---- model directories ---------------------------------------------------------------------- */

#define N_TENSORS 10
static dpl_st_tensor shard_tensors[N_TENSORS];
static char shard_names[N_TENSORS][8];

// Tensor i has i + 1 elements; every third is F32, the others BF16.
static void make_tensors(void) {
    for (size_t i = 0; i < N_TENSORS; i++) {
        snprintf(shard_names[i], sizeof shard_names[i], "w%zu", i);
        shard_tensors[i] = (dpl_st_tensor){.name = shard_names[i],
                                           .rank = 1,
                                           .dtype = i % 3 ? DPL_ST_BF16 : DPL_ST_F32,
                                           .shape = {(int64_t)i + 1}};
    }
}

static const void *fill(void *arg, size_t i_tensor) {
    static uint8_t data[64]; // gone with the next call, as the interface allows
    return memset(data, *(const int *)arg + (int)i_tensor, sizeof data);
}

static void check_shards(const char *dir, int first, size_t n_files) {
    dpl_st_file *shards;
    check_ok(dpl_st_open(dir, &shards));
    assert_int_equal(shards->n_tensors, N_TENSORS);
    const char *seen[N_TENSORS];
    size_t n_seen = 0;
    for (size_t i = 0; i < N_TENSORS; i++) {
        const dpl_st_tensor *tensor = &shards->tensors[i];
        size_t j = 0;
        while (j < n_seen && strcmp(seen[j], tensor->file)) j++;
        if (j == n_seen) seen[n_seen++] = tensor->file;
        assert_ptr_equal(dpl_st_find(shards, tensor->name), tensor);
        const size_t number = (size_t)(tensor->name[1] - '0');
        assert_int_equal(dpl_st_elems(tensor), number + 1);
        for (j = 0; j < tensor->bytes; j++) assert_int_equal(tensor->data[j], first + (int)number);
        assert_int_equal((uintptr_t)tensor->data % dpl_st_dtype_bytes(tensor->dtype), 0);
    }
    assert_int_equal(n_seen, n_files);
    assert_null(dpl_st_find(shards, "w"));
    assert_null(dpl_st_find(shards, "x"));
    dpl_st_close(&shards);
    assert_null(shards);
}

static void shard_sets(void **state) {
    (void)state;
    char dir[PATH_MAX];
    strcpy(dir, scratch_path("model"));
    // Bytes: F32 4, 16, 28, 40; BF16 4, 6, 10, 12, 16, 18: 154 in all.
    static const struct {
        size_t shard_bytes, n_files;
    } cases[] = {{40, 5},   {64, 3}, {1, 10},  {0, 1},  {60, 3},
                 {1000, 1}, {64, 3}, {154, 1}, {153, 2}};
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        int first = (int)i + 1;
        check_ok(dpl_remove_tree(dir));
        check_ok(dpl_make_dirs(dir));
        check_ok(
            dpl_st_write_dir(dir, shard_tensors, N_TENSORS, cases[i].shard_bytes, fill, &first));
        check_shards(dir, first, cases[i].n_files);
        const size_t n_files = cases[i].n_files;
        assert_int_equal(scratch_count(dir), n_files + (n_files > 1)); // one index
        if (n_files == 1) continue;
        json_t *index;
        check_ok(dpl_json_read(scratch_path("model/model.safetensors.index.json"), &index));
        const json_t *total = json_object_get(json_object_get(index, "metadata"), "total_size");
        assert_int_equal(json_integer_value(total), 154);
        assert_int_equal(json_object_size(json_object_get(index, "weight_map")), N_TENSORS);
        json_decref(index);
    }
}

static void shard_stale(void **state) {
    (void)state;
    char dir[PATH_MAX];
    strcpy(dir, scratch_path("stale"));
    check_ok(dpl_make_dirs(dir));
    int first = 3;
    // A file that no index names, even a damaged one, is not looked at.
    check_ok(dpl_st_write_dir(dir, shard_tensors, N_TENSORS, 64, fill, &first));
    scratch_text(scratch_path("stale/model-00004-of-00005.safetensors"), "not a file");
    check_shards(dir, first, 3);
    // Both forms: the single file wins, with a notice.
    check_ok(dpl_st_write_dir(scratch_path("."), shard_tensors, N_TENSORS, 0, fill, &(int){7}));
    assert_int_equal(
        rename(scratch_path("model.safetensors"), scratch_path("stale/model.safetensors")), 0);
    scratch_log_start();
    check_shards(dir, 7, 1);
    assert_non_null(strstr(scratch_log_stop(), "the index is not used"));
    check_ok(dpl_st_write_dir(dir, shard_tensors, N_TENSORS, 64, fill, &first));
    check_shards(dir, first, 3);
    assert_false(dpl_path_exists(scratch_path("stale/model.safetensors")));
    // Fewer shards, more, and one file, each where the others were.
    static const size_t shard_bytes[] = {40, 64, 153, 1, 0, 60, 0};
    for (size_t i = 0; i < DPL_COUNT(shard_bytes); i++) {
        first = 20 + (int)i;
        check_ok(dpl_st_write_dir(dir, shard_tensors, N_TENSORS, shard_bytes[i], fill, &first));
        check_shards(dir, first, ((const size_t[]){5, 3, 2, 10, 1, 3, 1})[i]);
    }
    assert_false(dpl_path_exists(scratch_path("stale/model.safetensors.index.json")));
}

static void edit_index(const char *dir, const char *tensor, const char *file, json_int_t total) {
    char path[PATH_MAX];
    json_t *index;
    check_ok(dpl_path_join(dir, "model.safetensors.index.json", path));
    check_ok(dpl_json_read(path, &index));
    json_t *map = json_object_get(index, "weight_map");
    if (file) json_object_set_new(map, tensor, json_string(file));
    else json_object_del(map, tensor);
    if (total)
        json_object_set_new(json_object_get(index, "metadata"), "total_size", json_integer(total));
    check_ok(dpl_json_write(path, index));
    json_decref(index);
}

static void shard_errors(void **state) {
    (void)state;
    char dir[PATH_MAX];
    strcpy(dir, scratch_path("bad"));
    check_ok(dpl_make_dirs(dir));
    dpl_st_file *shards = NULL;
    check_error(dpl_st_open(dir, &shards), DPL_EIO, "/bad: neither", "");
    int first = 1;
    static const struct {
        const char *tensor, *file, *part, *part2;
    } cases[] = {
        {"extra", "model-00001-of-00003.safetensors", "index.json: weight_map: tensor extra",
         "not in model-00001"},
        {"w0", NULL, "model-00001-of-00003.safetensors: holds tensor w0", "nowhere"},
        {"w0", "model-00002-of-00003.safetensors", "index.json: weight_map: tensor w0",
         "not in model-00002"},
        {"w0", "model-00009-of-00003.safetensors", "bad/model-00009-of-00003.safetensors", "open"},
        {"w0", "../model-00001-of-00003.safetensors", "index.json: weight_map: tensor w0",
         "folder"},
        {"w0", "/etc/passwd", "index.json: weight_map: tensor w0", "folder"},
        {"w0", "", "index.json: weight_map: tensor w0", "folder"},
        {"w0", "..", "bad/..", "regular"},
    };
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        check_ok(dpl_st_write_dir(dir, shard_tensors, N_TENSORS, 64, fill, &first));
        edit_index(dir, cases[i].tensor, cases[i].file, 0);
        const dpl_status status = dpl_st_open(dir, &shards);
        assert_true(status == DPL_EFORMAT || status == DPL_EIO);
        check_error(status, status, cases[i].part, cases[i].part2);
        assert_null(shards);
    }
    check_ok(dpl_st_write_dir(dir, shard_tensors, N_TENSORS, 64, fill, &first));
    edit_index(dir, "w0", "model-00001-of-00003.safetensors", 155);
    scratch_log_start();
    check_shards(dir, first, 3);
    assert_non_null(strstr(scratch_log_stop(), "total_size is 155, but its tensors have 154"));
    // A shard that is missing, and one that is cut.
    assert_int_equal(truncate(scratch_path("bad/model-00002-of-00003.safetensors"), 200), 0);
    check_error(dpl_st_open(dir, &shards), DPL_EFORMAT, "model-00002-of-00003.safetensors", "");
    assert_int_equal(unlink(scratch_path("bad/model-00002-of-00003.safetensors")), 0);
    check_error(dpl_st_open(dir, &shards), DPL_EIO, "model-00002-of-00003.safetensors", "No such");
    static const char *const indexes[] = {"{}", "[]", "{\"weight_map\": []}",
                                          "{\"weight_map\": {\"a\": 1}}",
                                          "{\"weight_map\": {\"a\": \"x\", \"a\": \"y\"}}"};
    for (size_t i = 0; i < DPL_COUNT(indexes); i++) {
        scratch_text(scratch_path("bad/model.safetensors.index.json"), indexes[i]);
        check_error(dpl_st_open(dir, &shards), DPL_EFORMAT, "index.json", "");
    }
    assert_null(shards);
}

static void shard_writer_errors(void **state) {
    (void)state;
    char dir[PATH_MAX];
    strcpy(dir, scratch_path("swe"));
    check_ok(dpl_make_dirs(dir));
    dpl_st_tensor twice[2] = {shard_tensors[0], shard_tensors[0]};
    check_error(dpl_st_write_dir(dir, twice, 2, 1, fill, &(int){0}), DPL_EINVAL, "w0", "taken");
    twice[1].rank = 100;
    check_error(dpl_st_write_dir(dir, twice, 2, 1, fill, &(int){0}), DPL_EINVAL, "w0", "shape");
    assert_int_equal(scratch_count(dir), 0);
    check_error(dpl_st_write_dir(scratch_path("none/a"), shard_tensors, 1, 1, fill, &(int){0}),
                DPL_EIO, "none", "");
    for (int kind = 0; kind < 2; kind++) {
        void (*inject)(size_t) = kind ? dpl_fault_alloc : dpl_fault_write;
        size_t n = 0;
        for (dpl_status status = DPL_EIO; status != DPL_OK;) {
            check_ok(dpl_remove_tree(dir));
            check_ok(dpl_make_dirs(dir));
            inject(++n);
            status = dpl_st_write_dir(dir, shard_tensors, N_TENSORS, 64, fill, &(int){9});
            inject(0);
            // Whole files may be there, but no index without all of them, and nothing hidden.
            const size_t n_files = scratch_count(dir);
            assert_true(n_files <= 4);
            for (int i = 1; i <= 3; i++) {
                const bool there = dpl_path_exists(scratch_path("swe/model-0000%d-of-00003"
                                                                ".safetensors",
                                                                i));
                assert_int_equal(there, n_files >= (size_t)i);
            }
        }
        assert_true(n > (kind ? 4 : 9));
    }
    check_shards(dir, 9, 3);
    for (size_t n = 1;; n++) { // the reader's memory
        dpl_st_file *shards = NULL;
        dpl_fault_alloc(n);
        const dpl_status status = dpl_st_open(dir, &shards);
        dpl_fault_alloc(0);
        dpl_st_close(&shards);
        if (status == DPL_OK) break;
        check_error(status, DPL_ENOMEM, "swe", "");
    }
}

/* ---- reference models ----------------------------------------------------------------------- */

static void compare_folder(const char *name) {
    fixture want;
    assert_true(fixture_open(fixture_path("%s", name), &want));
    dpl_st_file *shards;
    check_ok(dpl_st_open(fixture_path("%s", name), &shards));
    assert_int_equal(shards->n_tensors, want.n);
    for (int i = 0; i < want.n; i++) {
        const fixture_tensor *w = &want.at[i];
        const dpl_st_tensor *got = dpl_st_find(shards, w->name);
        assert_non_null(got);
        assert_string_equal(dpl_st_dtype_name(got->dtype), w->dtype);
        assert_int_equal(got->rank, w->n_dims);
        for (int j = 0; j < got->rank; j++) assert_int_equal(got->shape[j], w->shape[j]);
        assert_int_equal(got->bytes, w->bytes);
        assert_memory_equal(got->data, w->data, w->bytes);
        double *values = fixture_values(w);
        float *f32 = malloc(w->n * sizeof *f32);
        check_ok(dpl_st_read_f32(got, f32));
        for (size_t j = 0; j < w->n; j++) assert_true((double)f32[j] == values[j]);
        free(f32);
        free(values);
    }
    print_message("%s: %d tensors\n", name, want.n);
    dpl_st_close(&shards);
    fixture_close(&want);
}

static void reference_models(void **state) {
    (void)state;
    static const char *const names[] = {"deepseek_v3",
                                        "deepseek_v3_noqlora",
                                        "deepseek_v3_yarn",
                                        "deepseek_v3_halfrope",
                                        "deepseek_v3_bf16",
                                        "deepseek_v3_mtp",
                                        "deepseek_v2",
                                        "deepseek_v2_group",
                                        "qwen3_moe",
                                        "mixtral",
                                        "olmoe",
                                        "qwen2_moe",
                                        "glm4_moe",
                                        "gpt_oss",
                                        "llama",
                                        "maxtext_trajectory"};
    if (!fixture_root()) {
        print_message("SKIPPED: reference_models: no fixtures\n");
        skip();
    }
    for (size_t i = 0; i < DPL_COUNT(names); i++) compare_folder(names[i]);
    dpl_st_file *file;
    check_ok(dpl_st_open(fixture_path("formats.safetensors"), &file));
    assert_int_equal(dpl_st_find(file, "nv.packed")->dtype, DPL_ST_U8);
    dpl_st_close(&file);
    check_ok(dpl_st_open(fixture_path("llama/input.safetensors"), &file));
    const dpl_st_tensor *ids = dpl_st_find(file, "input_ids");
    int32_t *values = malloc(dpl_st_elems(ids) * sizeof *values);
    check_ok(dpl_st_read_i32(ids, 0, 319, values));
    free(values);
    dpl_st_close(&file);
    check_ok(dpl_st_open(fixture_path("llama/model.safetensors"), &file));
    check_metadata(file->path, "format", "pt");
    dpl_st_close(&file);
}

int main(void) {
    make_tensors();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hostile_headers),     cmocka_unit_test(hostile_sizes),
        cmocka_unit_test(truncated),           cmocka_unit_test(half_values),
        cmocka_unit_test(all_dtypes),          cmocka_unit_test(round_trip),
        cmocka_unit_test(no_tensors),          cmocka_unit_test(writer_errors),
        cmocka_unit_test(writer_faults),       cmocka_unit_test(shard_sets),
        cmocka_unit_test(shard_stale),         cmocka_unit_test(shard_errors),
        cmocka_unit_test(shard_writer_errors), cmocka_unit_test(reference_models),
    };
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
