/*
 * test_io.c - mapped files, all-or-nothing files and directories, JSON, YAML and numbers.
 *
 * Every write, sync and rename is made to fail once, and a writer is killed at random moments:
 * what is found under the final name afterwards must be whole, old or new.
 */
#include <fcntl.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/io.h"
#include "scratch.h"

/* ---- files ---------------------------------------------------------------------------------- */

static void maps(void **state) {
    (void)state;
    dpl_map map;
    const char *path = scratch_path("a");
    scratch_text(path, "hello");
    check_ok(dpl_map_open(path, &map));
    assert_int_equal(map.bytes, 5);
    assert_memory_equal(map.data, "hello", 5);
    dpl_map_close(&map);
    scratch_text(path, "");
    check_ok(dpl_map_open(path, &map));
    assert_int_equal(map.bytes, 0);
    assert_non_null(map.data);
    dpl_map_close(&map);
    check_error(dpl_map_open(scratch_path("none"), &map), DPL_EIO, "/none", "No such file");
    check_error(dpl_map_open(scratch_path("."), &map), DPL_EIO, "regular", "");
    assert_int_equal(mkfifo(scratch_path("fifo"), 0600), 0);
    alarm(20); // Opening a fifo must not wait for its writer.
    check_error(dpl_map_open(scratch_path("fifo"), &map), DPL_EIO, "/fifo", "regular");
    alarm(0);
}

static void folders(void **state) {
    (void)state;
    check_ok(dpl_make_dirs(scratch_path("x/y//z/")));
    check_ok(dpl_make_dirs(scratch_path("x/y/z")));
    assert_true(dpl_path_is_dir(scratch_path("x/y/z")));
    scratch_text(scratch_path("x/y/file"), "1");
    assert_true(dpl_path_exists(scratch_path("x/y/file")));
    assert_false(dpl_path_is_dir(scratch_path("x/y/file")));
    check_error(dpl_make_dirs(scratch_path("x/y/file/q")), DPL_EIO, "x/y/file", "");
    scratch_text(scratch_path("keep"), "1");
    assert_int_equal(symlink(scratch_path("keep"), scratch_path("x/link")), 0);
    check_ok(dpl_remove_tree(scratch_path("x")));
    assert_false(dpl_path_exists(scratch_path("x")));
    assert_true(dpl_path_exists(scratch_path("keep"))); // A link is removed, not what it names.
    check_ok(dpl_remove_tree(scratch_path("x")));
    check_ok(dpl_make_dirs("."));
}

static void long_paths(void **state) {
    (void)state;
    char path[PATH_MAX + 100], out[PATH_MAX];
    memset(path, 'a', sizeof path);
    for (size_t i = 0; i < sizeof path; i += 100) path[i] = '/';
    path[sizeof path - 1] = '\0';
    dpl_map map;
    dpl_out folder;
    check_error(dpl_path_join(path, "b", out), DPL_EIO, "longer", "");
    check_error(dpl_map_open(path, &map), DPL_EIO, "longer", "");
    check_error(dpl_make_dirs(path), DPL_EIO, "longer", "");
    check_error(dpl_write_file(path, "", 0), DPL_EIO, "longer", "");
    check_error(dpl_out_open_dir(path, &folder), DPL_EIO, "longer", "");
    // Two that are short enough alone.
    path[PATH_MAX / 2] = '\0';
    check_error(dpl_path_join(path, path, out), DPL_EIO, "longer", "");
    // One to which only the temporary name does not fit.
    memset(path, 'a', sizeof path);
    for (size_t i = 0; i < PATH_MAX; i += 2) path[i] = '/';
    path[PATH_MAX - 1] = '\0';
    check_error(dpl_write_file(path, "", 0), DPL_EIO, "longer", "");
}

static void odd_names(void **state) {
    (void)state;
    static const char *const bad[] = {"", "/", ".", "..", "a/..", "a/./", "//"};
    dpl_out out;
    for (size_t i = 0; i < DPL_COUNT(bad); i++) {
        check_error(dpl_write_file(bad[i], "x", 1), DPL_EINVAL, "name", "");
        check_error(dpl_out_open_dir(bad[i], &out), DPL_EINVAL, "name", "");
    }
    check_error(dpl_write_file(scratch_path("none/a"), "x", 1), DPL_EIO, "none/.a.tmp", "");
    check_ok(dpl_make_dirs(scratch_path("folder/sub")));
    check_error(dpl_write_file(scratch_path("folder"), "x", 1), DPL_EIO, "folder", "");
    assert_false(dpl_path_exists(scratch_path(".folder.tmp")));
}

static void file_faults(void **state) {
    (void)state;
    check_ok(dpl_make_dirs(scratch_path("ff")));
    char path[PATH_MAX];
    strcpy(path, scratch_path("ff/f"));
    size_t n = 0;
    for (dpl_status status = DPL_EIO; status != DPL_OK;) {
        scratch_text(path, "old");
        dpl_fault_write(++n);
        status = dpl_write_file(path, "newer", 5);
        dpl_fault_write(0);
        if (status != DPL_OK) check_error(status, DPL_EIO, "/ff", "No space left");
        assert_true(scratch_holds(path, "newer", 5) ||
                    (status != DPL_OK && scratch_holds(path, "old", 3)));
        assert_int_equal(scratch_count(scratch_path("ff")), 1);
    }
    assert_int_equal(n, 5); // write, sync, rename, sync of the folder; then none was left to fail
}

// Needs to mount a small file system, hence root, in a mount namespace of its own.
static void full_disk(void **state) {
    (void)state;
    const char *dir = scratch_path("disk");
    check_ok(dpl_make_dirs(dir));
    const pid_t child = fork();
    if (child == 0) {
        if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
            mount("none", dir, "tmpfs", 0, "size=64k") != 0)
            _exit(77);
        static char data[1 << 20];
        const char *path = scratch_path("disk/file");
        int bad = dpl_write_file(path, "old", 3) != DPL_OK;
        bad |= dpl_write_file(path, data, sizeof data) != DPL_EIO;
        bad |= !strstr(dpl_error_message(), path) || !strstr(dpl_error_message(), "No space");
        bad |= !scratch_holds(path, "old", 3);
        const dpl_st_tensor tensor = {.name = "t",
                                      .dtype = DPL_ST_U8,
                                      .rank = 1,
                                      .shape = {sizeof data},
                                      .data = (const uint8_t *)data};
        bad |= dpl_st_write(scratch_path("disk/st"), &tensor, 1, NULL, NULL) != DPL_EIO;
        bad |= scratch_count(dir) != 1; // only the first file is left
        _exit(bad);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) {
        print_message("SKIPPED: full_disk: cannot mount a small file system\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* ---- directories ---------------------------------------------------------------------------- */

// A folder whose files all hold the generation's number.
static dpl_status save(const char *path, int generation) {
    char file[PATH_MAX], text[16];
    dpl_out out;
    DPL_TRY(dpl_out_open_dir(path, &out));
    snprintf(text, sizeof text, "%d", generation);
    dpl_status status = DPL_OK;
    for (int i = 0; i < 3 && status == DPL_OK; i++) {
        static const char *const names[] = {"a", "sub/b", "sub/deep/c"};
        status = dpl_path_join(out.temp, "sub/deep", file);
        if (status == DPL_OK) status = dpl_make_dirs(file);
        if (status == DPL_OK) status = dpl_path_join(out.temp, names[i], file);
        if (status == DPL_OK) status = dpl_write_file(file, text, strlen(text));
    }
    return dpl_out_close(&out, status);
}

// The generation of a whole folder; -1 if there is none. A mixture ends the test.
static int loaded(const char *path) {
    static const char *const names[] = {"a", "sub/b", "sub/deep/c"};
    int generation = -1;
    if (!dpl_path_exists(path)) return -1;
    for (int i = 0; i < 3; i++) {
        char file[PATH_MAX];
        int found = -1;
        check_ok(dpl_path_join(path, names[i], file));
        FILE *f = fopen(file, "r");
        if (!f || fscanf(f, "%d", &found) != 1) fail_msg("%s is not whole", file);
        fclose(f);
        if (i > 0) assert_int_equal(found, generation);
        generation = found;
    }
    return generation;
}

static void stage_faults(void **state) {
    (void)state;
    check_ok(dpl_make_dirs(scratch_path("st")));
    char path[PATH_MAX];
    strcpy(path, scratch_path("st/ck"));
    for (int with_old = 0; with_old < 2; with_old++) {
        size_t n = 0;
        for (dpl_status status = DPL_EIO; status != DPL_OK;) {
            check_ok(dpl_remove_tree(path));
            if (with_old) check_ok(save(path, 1));
            dpl_fault_write(++n);
            status = save(path, 2);
            dpl_fault_write(0);
            if (status != DPL_OK) check_error(status, DPL_EIO, "/st", "No space left");
            const int generation = loaded(path);
            if (status == DPL_OK) assert_int_equal(generation, 2);
            else assert_true(generation == 2 || generation == (with_old ? 1 : -1));
            assert_int_equal(scratch_count(scratch_path("st")), generation < 0 ? 0 : 1);
        }
        // Three files of four steps, six syncs, rename (and exchange), sync of the parent.
        assert_int_equal(n - 1, 12 + 6 + 1 + with_old + 1);
    }
    // An empty folder, and one that a killed run left, are no obstacles.
    check_ok(dpl_remove_tree(path));
    check_ok(dpl_make_dirs(path));
    check_ok(dpl_make_dirs(scratch_path("st/.ck.tmp/sub/b")));
    check_ok(save(path, 3));
    assert_int_equal(loaded(path), 3);
    assert_int_equal(scratch_count(scratch_path("st")), 1);
    // A file is one.
    scratch_text(scratch_path("st/file"), "x");
    check_error(save(scratch_path("st/file"), 4), DPL_EIO, "st/file", "");
    assert_true(scratch_holds(scratch_path("st/file"), "x", 1));
}

static void killed_saves(void **state) {
    (void)state;
    check_ok(dpl_make_dirs(scratch_path("kill")));
    char path[PATH_MAX];
    strcpy(path, scratch_path("kill/ck"));
    check_ok(save(path, 0));
    const unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    srand(seed);
    int last = 0, n_moves = 0;
    for (int i = 0; i < 15; i++) {
        int saved[2]; // The child tells of each save, since a disk may be slow.
        assert_int_equal(pipe2(saved, O_NONBLOCK), 0);
        const pid_t child = fork();
        if (child == 0)
            for (int generation = last + 1;; generation++)
                if (save(path, generation) != DPL_OK || write(saved[1], "x", 1) != 1) _exit(1);
        const double end = dpl_now() + 1e-5 * (rand() % 2000);
        const double limit = end + 60;
        for (int n_saved = 0; n_saved < i % 3 || dpl_now() < end;) {
            assert_true(dpl_path_exists(path)); // never a moment without one
            assert_true(dpl_now() < limit);
            char byte;
            n_saved += read(saved[0], &byte, 1) == 1;
        }
        assert_int_equal(kill(child, SIGKILL), 0);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        close(saved[0]);
        close(saved[1]);
        const int generation = loaded(path);
        assert_true(generation >= last + i % 3);
        n_moves += generation > last;
        last = generation;
    }
    assert_true(n_moves >= 10);
    check_ok(save(path, last + 1));
    assert_int_equal(scratch_count(scratch_path("kill")), 1);
}

/* ---- numbers -------------------------------------------------------------------------------- */

static void check_numbers(void) {
    static const struct {
        const char *text;
        double value;
    } good[] = {
        {"2e-5", 2e-5}, {"2.0e-5", 2e-5},     {"2E-5", 2e-5},
        {".5", 0.5},    {"1_000", 1000},      {"0x10", 16},
        {"0.1", 0.1},   {"-3", -3},           {"+1.5", 1.5},
        {"1.", 1},      {"1e5", 1e5},         {"1e+05", 1e5},
        {"-0x1f", -31}, {"0X1F", 31},         {"1_0.2_5", 10.25},
        {"1e-400", 0},  {"4.9e-324", 5e-324}, {"1.7976931348623157e308", 1.7976931348623157e308},
    };
    static const char *const bad[] = {
        "1e400", "-1e400", "nan",  "inf", "-inf", "abc",   "",     " 1",   "1 ",    "1,5", "0,1",
        "1.2.3", "e5",     "1e",   "1e+", ".",    "-",     "+",    "0x",   "0x1p3", "0xg", "_1",
        "1_",    "1__0",   "1._5", "1f",  "--1",  "1e5.0", "1_e5", "1e_5", "0b1",   "1\n"};
    for (size_t i = 0; i < DPL_COUNT(good); i++) {
        double value = NAN;
        check_ok(dpl_parse_f64(good[i].text, &value));
        if (value != good[i].value) fail_msg("'%s' gave %.17g", good[i].text, value);
    }
    for (size_t i = 0; i < DPL_COUNT(bad); i++) {
        double value = 77;
        check_error(dpl_parse_f64(bad[i], &value), DPL_EINVAL, bad[i], "");
        assert_true(value == 77);
    }
    double value;
    check_ok(dpl_parse_f64("-0", &value));
    assert_true(value == 0 && signbit(value));
}

static void floats(void **state) {
    (void)state;
    check_numbers();
    char text[1000];
    memset(text, '1', sizeof text);
    text[999] = '\0';
    double value;
    check_error(dpl_parse_f64(text, &value), DPL_EINVAL, "111", "");
}

static void integers(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int64_t value;
    } good[] = {{"0", 0},
                {"-0", 0},
                {"1_000_000", 1000000},
                {"0x1F", 31},
                {"+7", 7},
                {"0x0010", 16},
                {"9223372036854775807", INT64_MAX},
                {"-9223372036854775808", INT64_MIN},
                {"-0x8000000000000000", INT64_MIN}};
    static const char *const bad[] = {"",
                                      "-",
                                      "1.0",
                                      "2e5",
                                      "010",
                                      "00",
                                      "0x",
                                      "1_",
                                      "_1",
                                      "1__1",
                                      " 1",
                                      "1 ",
                                      "abc",
                                      "9223372036854775808",
                                      "0x_1",
                                      "0b1",
                                      "-9223372036854775809",
                                      "99999999999999999999",
                                      "1-"};
    for (size_t i = 0; i < DPL_COUNT(good); i++) {
        int64_t value = 77;
        check_ok(dpl_parse_i64(good[i].text, &value));
        assert_true(value == good[i].value);
    }
    for (size_t i = 0; i < DPL_COUNT(bad); i++) {
        int64_t value = 77;
        check_error(dpl_parse_i64(bad[i], &value), DPL_EINVAL, bad[i], "");
        assert_true(value == 77);
    }
}

static void read_json_numbers(void) {
    static const double values[] = {0.1, 1e-5, 1.0 / 3, 1.7976931348623157e308, 5e-324, -0.0, 1e16};
    json_t *object = json_object(), *back;
    json_t *array = json_array();
    for (size_t i = 0; i < DPL_COUNT(values); i++)
        json_array_append_new(array, json_real(values[i]));
    json_object_set_new(object, "values", array);
    json_object_set_new(object, "big", json_integer(9007199254740993));
    const char *path = scratch_path("n.json");
    check_ok(dpl_json_write(path, object));
    check_ok(dpl_json_read(path, &back));
    for (size_t i = 0; i < DPL_COUNT(values); i++) {
        const double got = json_real_value(json_array_get(json_object_get(back, "values"), i));
        assert_memory_equal(&got, &values[i], sizeof got);
    }
    assert_true(json_integer_value(json_object_get(back, "big")) == 9007199254740993);
    json_decref(back);
    json_decref(object);
}

static void comma_locale(void **state) {
    (void)state;
    check_ok(dpl_make_dirs(scratch_path("locale")));
    char command[1024];
    snprintf(command, sizeof command, "localedef -i de_DE -f UTF-8 %s > /dev/null 2>&1",
             scratch_path("locale/de_DE.UTF-8"));
    const int rc = system(command);
    setenv("LOCPATH", scratch_path("locale"), 1);
    const bool there = rc == 0 && setlocale(LC_ALL, "de_DE.UTF-8");
    char text[16];
    snprintf(text, sizeof text, "%.1f", 0.1);
    if (there) {
        assert_string_equal(text, "0,1"); // The locale is in force,
        check_numbers();                  // and does not matter.
        read_json_numbers();
        setlocale(LC_ALL, "C");
    }
    unsetenv("LOCPATH");
    if (!there) {
        print_message("SKIPPED: comma_locale: localedef cannot make de_DE\n");
        skip();
    }
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static void json_files(void **state) {
    (void)state;
    read_json_numbers();
    const char *path = scratch_path("a.json");
    json_t *object = NULL;
    static const struct {
        const char *text, *part;
    } bad[] = {
        {"{\"a\": 1,\n \"a\": 2}", "line 2"},
        {"[1]", "not a JSON object"},
        {"", "byte 0"},
        {"{\"a\": 1} x", "line 1"},
        {"{\"a\": \"\xff\"}", "byte"},
        {"{\"a\": {\"b\": 1, \"b\": 2}}", "duplicate"},
        {"{\n\n\"a\" 1}", "line 3"},
        {"{\"a\": 1e999}", "line 1"},
        {"{\"a\": \"\\u0000\"}", "line 1"},
        {"{\"a\": 99999999999999999999}", "big"},
    };
    for (size_t i = 0; i < DPL_COUNT(bad); i++) {
        scratch_text(path, bad[i].text);
        check_error(dpl_json_read(path, &object), DPL_EFORMAT, "a.json", bad[i].part);
        assert_null(object);
    }
    check_error(dpl_json_read(scratch_path("none.json"), &object), DPL_EIO, "none.json", "");
    object = json_object();
    json_object_set_new(object, "z", json_integer(1));
    json_object_set_new(object, "a", json_integer(2));
    check_ok(dpl_json_write(path, object)); // the order stays
    assert_true(scratch_holds(path, "{\n  \"z\": 1,\n  \"a\": 2\n}\n", 23));
    json_decref(object);
}

/* ---- YAML ----------------------------------------------------------------------------------- */

static char yaml_text[4096];

static dpl_status note_pair(void *arg, const char *key, const char *value, int line) {
    const char *refused = arg;
    if (refused && !strcmp(key, refused)) return dpl_fail(DPL_EINVAL, "%s is refused", key);
    const size_t used = strlen(yaml_text);
    snprintf(yaml_text + used, sizeof yaml_text - used, "%d:%s=%s|", line, key, value);
    return DPL_OK;
}

static dpl_status read_yaml(const char *text, char *refused) {
    scratch_text(scratch_path("c.yml"), text);
    yaml_text[0] = '\0';
    return dpl_yaml_read(scratch_path("c.yml"), note_pair, refused);
}

static void yaml_good(void **state) {
    (void)state;
    static const struct {
        const char *text, *pairs;
    } cases[] = {
        {"", ""},
        {"# only this\n", ""},
        {"---\n", ""},
        {"{}", ""},
        {"a: 1\nb: 2e-5 # why\n\nc: 'x: y'\n", "1:a=1|2:b=2e-5|4:c=x: y|"},
        {"a:\nb: null\nc: ~\nd: \"\"\ne: 'null'\n", "1:a=|2:b=|3:c=|4:d=|5:e=null|"},
        {"mlp_activations: [\"silu\", linear]\n", "1:mlp_activations=[\"silu\", \"linear\"]|"},
        {"a:\n- 1_0\n- 2e-1\n- true\n- ~\n- '3'\n- x\n",
         "1:a=[10, 0.20000000000000001, true, null, \"3\", \"x\"]|"},
        {"rules: [['a', ['b', 'c']], []]\n", "1:rules=[[\"a\", [\"b\", \"c\"]], []]|"},
        {"a: True\nb: -1\nc: /x/y.txt\n", "1:a=True|2:b=-1|3:c=/x/y.txt|"},
        {"a: |\n  two\n  lines\nb: >\n  one\n  line\n", "1:a=two\nlines\n|4:b=one line\n|"},
        {"a: \"\\u00e9\\n\"\r\nb: \xc3\xa9\r\n", "1:a=\xc3\xa9\n|2:b=\xc3\xa9|"},
        {"\xef\xbb\xbf"
         "a: 1",
         "1:a=1|"},
    };
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        check_ok(read_yaml(cases[i].text, NULL));
        assert_string_equal(yaml_text, cases[i].pairs);
    }
}

static void yaml_bad(void **state) {
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"a: 1\nb:\n  c: 2\n", "c.yml:3: a mapping inside"},
        {"a: {b: 1}\n", "c.yml:1: a mapping inside"},
        {"a: 1\nb: 2\na: 3\n", "c.yml:3: the key 'a' stands on line 1"},
        {"a: &x 1\n", "c.yml:1: anchors"},
        {"a: 1\nb: *x\n", "c.yml:2: aliases"},
        {"a: !!str 1\n", "c.yml:1: tags"},
        {"a: [!t 1]\n", "c.yml:1: tags"},
        {"a: [&x 1]\n", "c.yml:1: anchors"},
        {"a: !t [1]\n", "c.yml:1: tags"},
        {"&x {a: 1}\n", "c.yml:1: anchors"},
        {"!t {a: 1}\n", "c.yml:1: tags"},
        {"a: [1, {b: 2}]\n", "c.yml:1: expected a plain value"},
        {"? [a]\n: 1\n", "c.yml:1: expected a plain value"},
        {"a: 1\n---\nb: 2\n", "c.yml:2: a second document"},
        {"- a\n- b\n", "c.yml:1: expected lines"},
        {"just text\n", "c.yml:1: expected lines"},
        {"a: 1\n\tb: 2\n", "c.yml:2: "},
        {"a: 'open\n", "c.yml:"},
        {"a: [1, 2\n", "c.yml:"},
        {"a: \"x\\0y\"\n", "c.yml:1: a NUL"},
        {"a: \xff\n", "byte 3"},
        {"a: [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]\n", "c.yml:1: lists are nested"},
        {"<<: {a: 1}\n", "c.yml:1: a mapping inside"},
    };
    for (size_t i = 0; i < DPL_COUNT(cases); i++)
        check_error(read_yaml(cases[i].text, NULL), DPL_EFORMAT, "c.yml", cases[i].part);
    check_error(read_yaml("a: 1\nlr: abc\n", (char[]){"lr"}), DPL_EINVAL, "c.yml:2: lr is", "");
    assert_string_equal(yaml_text, "1:a=1|");
    check_error(dpl_yaml_read(scratch_path("none.yml"), note_pair, NULL), DPL_EIO, "none.yml", "");
    assert_int_equal(truncate(scratch_path("c.yml"), 17 << 20), 0);
    check_error(dpl_yaml_read(scratch_path("c.yml"), note_pair, NULL), DPL_EFORMAT, "c.yml", "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(maps),         cmocka_unit_test(folders),
        cmocka_unit_test(long_paths),   cmocka_unit_test(odd_names),
        cmocka_unit_test(file_faults),  cmocka_unit_test(full_disk),
        cmocka_unit_test(stage_faults), cmocka_unit_test(killed_saves),
        cmocka_unit_test(floats),       cmocka_unit_test(integers),
        cmocka_unit_test(comma_locale), cmocka_unit_test(json_files),
        cmocka_unit_test(yaml_good),    cmocka_unit_test(yaml_bad),
    };
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
