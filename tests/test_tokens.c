/*
 * test_tokens.c - documents of tokens from text files, folders and token shards.
 *
 * Sizes around the limits of the reader (a small file, a block, a mapping, 2^31 tokens) and folders
 * with links, hidden, empty and very many files.
 */
#include <fcntl.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/io.h"
#include "scratch.h"

static dpl_source *open_text(const char *path) {
    dpl_source *source = NULL;
    check_ok(dpl_source_open(path, 1, 256, &source));
    return source;
}

static void check_bytes(const dpl_source *source, uint64_t first, const void *bytes, size_t n) {
    int32_t *ids = malloc((n + 1) * sizeof *ids);
    ids[n] = -7;
    dpl_source_read(source, first, n, ids);
    for (size_t i = 0; i < n; i++) assert_int_equal(ids[i], ((const uint8_t *)bytes)[i]);
    assert_int_equal(ids[n], -7);
    free(ids);
}

/* ---- text ----------------------------------------------------------------------------------- */

static void text_bytes(void **state) {
    (void)state;
    // Invalid UTF-8 and NUL are bytes like others.
    static const char odd[] = "abc\xff\xfe d\0ef\r\n";
    const char *path = scratch_path("odd.txt");
    scratch_write(path, odd, sizeof odd);
    dpl_source *source = open_text(path);
    assert_int_equal(source->n_tokens, sizeof odd);
    assert_int_equal(source->n_documents, 1);
    check_bytes(source, 0, odd, sizeof odd);
    dpl_source_close(&source);
    assert_null(source);
    dpl_source_close(&source);
    // A three-byte character across every likely boundary, in files copied and mapped.
    static const size_t sizes[] = {4095, 4096, 4097, 65535, 65536, 65537, 300000};
    for (size_t i = 0; i < DPL_COUNT(sizes); i++) {
        uint8_t *text = malloc(sizes[i]);
        for (size_t j = 0; j < sizes[i]; j++) text[j] = (uint8_t) "\xe2\x80\x99"[j % 3];
        scratch_write(path, text, sizes[i]);
        source = open_text(path);
        assert_int_equal(source->n_tokens, sizes[i]);
        check_bytes(source, 0, text, sizes[i]);
        check_bytes(source, 4094, text + 4094, 1);
        dpl_source_close(&source);
        free(text);
    }
}

static void text_errors(void **state) {
    (void)state;
    dpl_source *source = NULL;
    const char *path = scratch_path("small.txt");
    scratch_text(path, "ab\x7f"
                       "c\x80");
    check_ok(dpl_source_open(path, 1, 129, &source));
    dpl_source_close(&source);
    check_error(dpl_source_open(path, 1, 128, &source), DPL_EFORMAT, "small.txt: byte 4: token 128",
                "128");
    check_error(dpl_source_open(path, 1, 99, &source), DPL_EFORMAT, "small.txt: byte 2: token 127",
                "");
    check_error(dpl_source_open(path, 1, 0, &source), DPL_EINVAL, "vocab", "");
    check_error(dpl_source_open(path, 1, (size_t)1 << 31, &source), DPL_EINVAL, "vocab", "");
    check_error(dpl_source_open(scratch_path("none"), 1, 256, &source), DPL_EIO, "/none",
                "No such");
    scratch_text(path, "");
    scratch_log_start();
    check_error(dpl_source_open(path, 1, 256, &source), DPL_EFORMAT, "small.txt", "no token");
    assert_non_null(strstr(scratch_log_stop(), "small.txt is empty"));
    char path_long[PATH_MAX + 10];
    memset(path_long, 'a', sizeof path_long);
    path_long[sizeof path_long - 1] = '\0';
    check_error(dpl_source_open(path_long, 1, 256, &source), DPL_EIO, "longer", "");
    assert_null(source);
}

static void text_folder(void **state) {
    (void)state;
    check_ok(dpl_make_dirs(scratch_path("f/b/deep")));
    check_ok(dpl_make_dirs(scratch_path("f/.git")));
    check_ok(dpl_make_dirs(scratch_path("f/nothing")));
    scratch_text(scratch_path("f/c.txt"), "3");
    scratch_text(scratch_path("f/a.txt"), "11");
    scratch_text(scratch_path("f/b/x"), "22");
    scratch_text(scratch_path("f/b/deep/y"), "twotwo");
    scratch_text(scratch_path("f/b/empty"), ""); // between two documents
    scratch_text(scratch_path("f/.hidden"), "no");
    scratch_text(scratch_path("f/.git/no"), "no");
    scratch_text(scratch_path("f/a.empty"), "");
    scratch_text(scratch_path("linked"), "L");
    assert_int_equal(symlink("../linked", scratch_path("f/d")), 0);
    scratch_log_start();
    dpl_source *source = open_text(scratch_path("f"));
    const char *log = scratch_log_stop();
    assert_non_null(strstr(log, "f/a.empty is empty"));
    assert_non_null(strstr(log, "2 files are empty"));
    static const uint64_t starts[] = {0, 2, 8, 10, 11, 12};
    assert_int_equal(source->n_documents, 5);
    for (size_t i = 0; i < DPL_COUNT(starts); i++)
        assert_int_equal(source->documents[i], starts[i]);
    for (uint64_t token = 0; token < 12; token++) {
        const size_t i = dpl_source_document_of(source, token);
        assert_true(starts[i] <= token && token < starts[i + 1]);
    }
    check_bytes(source, 0, "11twotwo223L", 12);
    for (size_t first = 0; first <= 12; first++)
        for (size_t n = 0; first + n <= 12; n++)
            check_bytes(source, first, &"11twotwo223L"[first], n);
    dpl_source_close(&source);
    // A folder that contains itself, an unreadable name, a fifo.
    assert_int_equal(symlink("..", scratch_path("f/b/loop")), 0);
    check_error(dpl_source_open(scratch_path("f"), 1, 256, &source), DPL_EIO, "f/b/loop", "link");
    assert_int_equal(unlink(scratch_path("f/b/loop")), 0);
    assert_int_equal(symlink("nowhere", scratch_path("f/b/dangling")), 0);
    check_error(dpl_source_open(scratch_path("f"), 1, 256, &source), DPL_EIO, "f/b/dangling",
                "No such");
    assert_int_equal(unlink(scratch_path("f/b/dangling")), 0);
    assert_int_equal(mkfifo(scratch_path("f/b/fifo"), 0600), 0);
    check_error(dpl_source_open(scratch_path("f"), 1, 256, &source), DPL_EIO, "f/b/fifo",
                "regular");
    assert_int_equal(unlink(scratch_path("f/b/fifo")), 0);
    for (size_t i = 1;; i++) { // memory
        dpl_fault_alloc(i);
        scratch_log_start();
        const dpl_status status = dpl_source_open(scratch_path("f"), 1, 256, &source);
        scratch_log_stop();
        dpl_fault_alloc(0);
        if (status == DPL_OK) break;
        check_error(status, DPL_ENOMEM, "memory", "");
    }
    dpl_source_close(&source);
}

// Blocks, mappings and their borders, against a plain copy of everything.
static void many_sizes(void **state) {
    (void)state;
    const uint64_t seed = (uint64_t)(dpl_now() * 1e6);
    print_message("seed %llu\n", (unsigned long long)seed);
    check_ok(dpl_make_dirs(scratch_path("sizes")));
    uint8_t *all = malloc((size_t)64 << 20);
    size_t n_all = 0, starts[101];
    for (size_t i = 0; i < 100; i++) {
        const size_t kind = dpl_rng_u64(seed, 0, i) % 4;
        const size_t limit = ((const size_t[]){20, 5000, 65536, 200000})[kind];
        const size_t n = 1 + dpl_rng_u64(seed, 1, i) % limit;
        for (size_t j = 0; j < n; j++) all[n_all + j] = (uint8_t)dpl_rng_u64(seed, i + 2, j / 8);
        scratch_write(scratch_path("sizes/%03zu", i), all + n_all, n);
        starts[i] = n_all;
        n_all += n;
    }
    starts[100] = n_all;
    dpl_source *source = open_text(scratch_path("sizes"));
    assert_int_equal(source->n_tokens, n_all);
    assert_int_equal(source->n_documents, 100);
    for (size_t i = 0; i <= 100; i++) assert_int_equal(source->documents[i], starts[i]);
    check_bytes(source, 0, all, n_all);
    for (size_t i = 0; i < 2000; i++) {
        const size_t first = dpl_rng_u64(seed, 500, i) % n_all;
        const size_t n = dpl_rng_u64(seed, 501, i) % DPL_MIN(n_all - first, (size_t)3000);
        check_bytes(source, first, all + first, n);
        const size_t document = dpl_source_document_of(source, first);
        assert_true(starts[document] <= first && first < starts[document + 1]);
    }
    dpl_source_close(&source);
    free(all);
}

// A document costs 8 bytes, and while a folder is listed its names. DPL_TEST_FULL=1: a million.
static void many_documents(void **state) {
    (void)state;
    const char *full = getenv("DPL_TEST_FULL");
    const size_t n = full && *full == '1' ? 1000000 : 50000;
    char dir[PATH_MAX], target[PATH_MAX];
    strcpy(dir, scratch_path("many"));
    check_ok(dpl_make_dirs(dir));
    const int fd = open(dir, O_RDONLY | O_DIRECTORY);
    assert_true(fd >= 0);
    for (size_t i = 0; i < n; i++) { // Links are cheaper than files, but a file has only so many.
        if (i % 50000 == 0) {
            strcpy(target, scratch_path("target%zu", i / 50000));
            scratch_text(target, "x");
        }
        char name[32];
        snprintf(name, sizeof name, "%zu", i);
        assert_int_equal(linkat(AT_FDCWD, target, fd, name, 0), 0);
    }
    close(fd);
    FILE *file = fopen("/proc/self/clear_refs", "w"); // The peak starts anew.
    if (file) fputs("5", file), fclose(file);
    const size_t before = scratch_peak_bytes();
    dpl_source *source = open_text(dir);
    const size_t bytes = scratch_peak_bytes() - before;
    assert_int_equal(source->n_documents, n);
    assert_int_equal(source->n_tokens, n);
    dpl_source_close(&source);
    print_message("%zu documents: %zu bytes at most\n", n, bytes);
    if (!HAS_SANITIZER) assert_true(bytes < 80 * n + ((size_t)4 << 20));
}

/* ---- shards --------------------------------------------------------------------------------- */

// Writes a shard with llm.c's header, 16 bits a token where the vocabulary allows it.
static void write_bin(const char *path, size_t vocab, const int32_t *ids, size_t n) {
    const size_t width = vocab <= 65536 ? 2 : 4, bytes = 1024 + n * width;
    const uint32_t header[3] = {width == 2 ? 20240520 : 20240801, width == 2 ? 1 : 7, (uint32_t)n};
    uint8_t *file = calloc(1, bytes);
    memcpy(file, header, sizeof header);
    for (size_t i = 0; i < n; i++) memcpy(file + 1024 + i * width, &ids[i], width);
    scratch_write(path, file, bytes);
    free(file);
}

static void bin_round_trip(void **state) {
    (void)state;
    static const struct { size_t vocab, width; } cases[] = {{65536, 2}, {65537, 4}};
    static int32_t ids[70000], got[70000];
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        for (size_t j = 0; j < DPL_COUNT(ids); j++)
            ids[j] = (int32_t)(dpl_rng_u64(1, i, j) % cases[i].vocab);
        ids[7] = (int32_t)cases[i].vocab - 1;
        char path[PATH_MAX];
        strcpy(path, scratch_path("t.bin"));
        write_bin(path, cases[i].vocab, ids, DPL_COUNT(ids));
        dpl_source *source;
        check_ok(dpl_source_open(path, 0, cases[i].vocab, &source));
        assert_int_equal(source->n_tokens, DPL_COUNT(ids));
        assert_int_equal(source->n_documents, 1);
        dpl_source_read(source, 0, DPL_COUNT(ids), got);
        assert_memory_equal(got, ids, sizeof ids);
        dpl_source_read(source, 69999, 1, got);
        assert_int_equal(got[0], ids[69999]);
        dpl_source_close(&source);
        char part[64];
        snprintf(part, sizeof part, "t.bin: byte %zu: token %d", 1024 + 7 * cases[i].width, ids[7]);
        check_error(dpl_source_open(path, 0, cases[i].vocab - 1, &source), DPL_EFORMAT, part, "");
    }
}

static void bin_headers(void **state) {
    (void)state;
    static const struct {
        uint32_t magic, version, n;
        size_t bytes;     // behind the header
        const char *part; // NULL: a good file
    } cases[] = {
        {20240520, 1, 4, 8, NULL},
        {20240801, 1, 2, 8, NULL},
        {20240801, 7, 2, 8, NULL},
        {20240521, 1, 4, 8, "byte 0: no token header"},
        {20240520, 7, 4, 8, "byte 4: version 7"},
        {20240801, 2, 2, 8, "byte 4: version 2"},
        {20240520, 1, 5, 8, "byte 8: 5 tokens"},
        {20240520, 1, 3, 8, "byte 8: 3 tokens"},
        {20240520, 1, 4, 7, "byte 8: 4 tokens"},
        {20240520, 1, 0x80000004, 8, "byte 8: 2147483652 tokens"},
        {20240801, 7, 0x40000002, 8, "byte 8: "},
        {20240520, 1, 0, 0, "no token in it"},
    };
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        uint32_t file[256 + 8] = {cases[i].magic, cases[i].version, cases[i].n};
        const char *path = scratch_path("h.bin");
        scratch_write(path, file, 1024 + cases[i].bytes);
        dpl_source *source = NULL;
        scratch_log_start();
        const dpl_status status = dpl_source_open(path, 0, 10, &source);
        scratch_log_stop();
        if (!cases[i].part) {
            check_ok(status);
            assert_int_equal(source->n_tokens, cases[i].n);
            dpl_source_close(&source);
            check_error(dpl_source_open(path, 2, 65536, &source), DPL_EFORMAT,
                        "h.bin: byte 0: a header", "width");
        } else {
            check_error(status, DPL_EFORMAT, "h.bin: ", cases[i].part);
        }
        assert_null(source);
    }
}

static void bin_without_header(void **state) {
    (void)state;
    const char *path = scratch_path("raw.bin");
    scratch_write(path, "\x01\0\x02\0\xff\xff\x03\0", 8);
    dpl_source *source = NULL;
    int32_t ids[4];
    check_ok(dpl_source_open(path, 2, 65536, &source));
    assert_int_equal(source->n_tokens, 4);
    dpl_source_read(source, 0, 4, ids);
    assert_memory_equal(ids, ((const int32_t[]){1, 2, 65535, 3}), sizeof ids);
    dpl_source_close(&source);
    check_error(dpl_source_open(path, 4, 262143, &source), DPL_EFORMAT,
                "raw.bin: byte 4: token 262143", "has 262143");
    check_ok(dpl_source_open(path, 4, 262144, &source));
    dpl_source_read(source, 0, 2, ids);
    assert_memory_equal(ids, ((const int32_t[]){131073, 262143}), 8);
    dpl_source_close(&source);
    check_error(dpl_source_open(path, 0, 256, &source), DPL_EFORMAT,
                "raw.bin: byte 0: no token header", "");
    check_error(dpl_source_open(path, 3, 256, &source), DPL_EINVAL, "width 3", "");
    scratch_write(path, "1234567", 7);
    check_error(dpl_source_open(path, 2, 65536, &source), DPL_EFORMAT,
                "raw.bin: byte 6: half a token", "");
    check_error(dpl_source_open(path, 4, 65536, &source), DPL_EFORMAT,
                "raw.bin: byte 4: half a token", "");
    scratch_write(path, "\xff\xff\xff\xff", 4); // not -1, and not accepted
    check_error(dpl_source_open(path, 4, INT32_MAX, &source), DPL_EFORMAT,
                "raw.bin: byte 0: token 4294967295", "");
    assert_null(source);
}

static void bin_folder(void **state) {
    (void)state;
    check_ok(dpl_make_dirs(scratch_path("bins")));
    scratch_text(scratch_path("bins/README.md"), "text");
    scratch_text(scratch_path("bins/notes.txt"), "text");
    scratch_text(scratch_path("bins/b.bin"), "");
    // Widths may differ between shards, so their blocks do too.
    write_bin(scratch_path("bins/a.bin"), 300, (const int32_t[]){1, 2, 3}, 3);
    write_bin(scratch_path("bins/c.bin"), 70000, (const int32_t[]){4, 5}, 2);
    write_bin(scratch_path("bins/d.bin"), 300, (const int32_t[]){6}, 1);
    dpl_source *source;
    scratch_log_start();
    check_ok(dpl_source_open(scratch_path("bins"), 0, 300, &source));
    const char *log = scratch_log_stop();
    assert_non_null(strstr(log, "README.md is no .bin"));
    assert_non_null(strstr(log, "2 files are no .bin"));
    assert_non_null(strstr(log, "b.bin is empty"));
    static const uint64_t starts[] = {0, 3, 5, 6};
    assert_int_equal(source->n_documents, 3);
    for (size_t i = 0; i < DPL_COUNT(starts); i++)
        assert_int_equal(source->documents[i], starts[i]);
    int32_t ids[6];
    dpl_source_read(source, 0, 6, ids);
    for (int i = 0; i < 6; i++) assert_int_equal(ids[i], i + 1);
    dpl_source_close(&source);
}

// Three sparse documents of 2^30 tokens: positions and byte offsets beyond 32 bits.
static void huge_offsets(void **state) {
    (void)state;
    check_ok(dpl_make_dirs(scratch_path("huge")));
    const off_t bytes = (off_t)1 << 31;
    for (uint16_t i = 0; i < 3; i++) {
        const int fd = open(scratch_path("huge/%d.bin", i), O_WRONLY | O_CREAT, 0600);
        const uint16_t last = (uint16_t)(65533 + i);
        assert_int_equal(pwrite(fd, &last, 2, bytes - 2), 2);
        close(fd);
    }
    dpl_source *source;
    check_ok(dpl_source_open(scratch_path("huge"), 2, 65536, &source));
    assert_int_equal(source->n_tokens, (uint64_t)3 << 30);
    for (size_t i = 0; i < 3; i++) {
        const uint64_t end = (uint64_t)(i + 1) << 30;
        int32_t ids[2] = {-1, -1};
        assert_int_equal(source->documents[i + 1], end);
        dpl_source_read(source, end - 1, i < 2 ? 2 : 1, ids);
        assert_int_equal(ids[0], 65533 + (int)i);
        assert_int_equal(ids[1], i < 2 ? 0 : -1);
        assert_int_equal(dpl_source_document_of(source, end - 1), i);
    }
    dpl_source_close(&source);
    // One document of more than 2^31 tokens: text.
    const int fd = open(scratch_path("huge.txt"), O_WRONLY | O_CREAT, 0600);
    assert_int_equal(pwrite(fd, "z", 1, bytes + 5), 1);
    close(fd);
    source = open_text(scratch_path("huge.txt"));
    assert_int_equal(source->n_tokens, ((uint64_t)1 << 31) + 6);
    check_bytes(source, ((uint64_t)1 << 31) + 3, "\0\0z", 3);
    dpl_source_close(&source);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_bytes),     cmocka_unit_test(text_errors),
        cmocka_unit_test(text_folder),    cmocka_unit_test(many_sizes),
        cmocka_unit_test(many_documents), cmocka_unit_test(bin_round_trip),
        cmocka_unit_test(bin_headers),    cmocka_unit_test(bin_without_header),
        cmocka_unit_test(bin_folder),     cmocka_unit_test(huge_offsets),
    };
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
