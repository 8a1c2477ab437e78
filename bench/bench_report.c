// bench_report.c - `bench report FILE.md`: runs the benchmarks that stand for the others and writes
// them as tables, with a roofline picture FILE.svg beside them.
//
// Every number of a table comes from one process on one machine; limits are measured again before
// each kind, since a shared machine changes.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"

typedef int (*kind_fn)(dpl_bench_args *args);
typedef struct section {
    const char *title, *about;
    kind_fn run;
    const char *rows;    // those whose "bench" is this
    const char *columns; // of the rows, in order
    const char *quick;   // what is added to the first line, which runs alone, by quick=true
    const char *lines[12];
} section;

#define EXPERTS "k=2048 n=1408 runs=5 "
static const section sections[] = {
    {"Machine",
     "What the limits below are made of.",
     dpl_bench_run_machine,
     "machine",
     "threads level gflops gflops_bf16 read_gbs read_write_gbs",
     "mbytes=1",
     {"mbytes=512"}},
    {"Kernels",
     "Which computes what, and why that one. Its limit is the peak of its own instructions.",
     dpl_bench_run_machine,
     "machine_kernel",
     "op level kernel why gflops",
     "mbytes=1",
     {"mbytes=1"}},
    {"Grouped GEMM, weights from memory",
     "Experts of DeepSeek-V2-Lite, `rows` tokens each. The limit is the larger of operations over "
     "the peak of the operands' type and bytes over the bandwidth; `fraction_fma` is of the limit "
     "with fp32's peak, which bf16 can exceed where the processor multiplies bf16 itself.",
     dpl_bench_run_gemm,
     "gemm",
     "op dtype experts rows kernel median_us gflops gbs limit limit_us fraction fraction_fma",
     "experts=2 rows=4 k=64 n=64 runs=1",
     {EXPERTS "experts=64 rows=1 dtype=bf16 op=forward",
      EXPERTS "experts=64 rows=16 dtype=bf16 op=forward", EXPERTS "experts=64 rows=64 dtype=bf16",
      EXPERTS "experts=16 rows=256 dtype=bf16", EXPERTS "experts=64 rows=64 dtype=f32",
      EXPERTS "experts=16 rows=256 dtype=f32", EXPERTS "experts=4 rows=1024 dtype=f32"}},
    {"Grouped GEMM of MXFP8 and NVFP4",
     "The same with weights in codes, and activations and gradients quantized on the way. "
     "`over_bf16`: the time of the bf16 product over this one's; both take turns. The limit is "
     "that of bf16 operands, which products in integers can exceed.",
     dpl_bench_run_gemm,
     "gemm",
     "op dtype experts rows kernel median_us gflops gbs limit limit_us fraction over_bf16",
     "experts=2 rows=4 k=64 n=64 runs=1",
     {EXPERTS "experts=64 rows=1 dtype=mxfp8 op=forward",
      EXPERTS "experts=64 rows=4 dtype=mxfp8 op=forward",
      EXPERTS "experts=64 rows=16 dtype=mxfp8 op=forward", EXPERTS "experts=64 rows=64 dtype=mxfp8",
      EXPERTS "experts=16 rows=256 dtype=mxfp8", EXPERTS "experts=64 rows=1 dtype=nvfp4 op=forward",
      EXPERTS "experts=64 rows=4 dtype=nvfp4 op=forward",
      EXPERTS "experts=64 rows=16 dtype=nvfp4 op=forward", EXPERTS "experts=64 rows=64 dtype=nvfp4",
      EXPERTS "experts=16 rows=256 dtype=nvfp4"}},
    {"Quantizers",
     "Beside a copy of the same numbers, which takes turns: the limit is the time that the copy "
     "would take for as many bytes as are read and written.",
     dpl_bench_run_quant,
     "quant",
     "format way rounding dtype rows n median_us gbs copy_gbs fraction",
     "rows=64 n=64 experts=2 runs=1",
     {"dtype=bf16", "dtype=f32", "dtype=bf16 format=nvfp4",
      "dtype=bf16 format=nvfp4 rounding=random"}},
    {"Grouped GEMM, one expert in cache",
     "The kernels alone.",
     dpl_bench_run_gemm,
     "gemm",
     "op dtype rows k n kernel median_us gflops limit fraction fraction_fma",
     "experts=2 rows=4 k=64 n=64 runs=1",
     {"experts=1 rows=256 k=512 n=512 runs=25 dtype=f32",
      "experts=1 rows=256 k=512 n=512 runs=25 dtype=bf16"}},
    {"Experts",
     "All 64 experts of DeepSeek-V2-Lite without router and dispatch: gate and up, SwiGLU, down; "
     "`rows` tokens each on average. The backward pass writes each weight's gradient once. Loads: "
     "equal; as 1/(e+1); 60 % on one. `over_balanced` is the time over that of equal loads.",
     dpl_bench_run_experts,
     "experts",
     "op dtype rows skew load_max_over_mean over_balanced median_us gflops limit limit_us "
     "fraction fraction_fma",
     "experts=2 rows=4 d=64 f=32 runs=1 mbytes=1",
     {"rows=6 runs=7 dtype=bf16", "rows=48 runs=5 dtype=bf16", "rows=384 runs=3 dtype=bf16",
      "rows=48 runs=5 dtype=bf16 skew=zipf", "rows=48 runs=5 dtype=bf16 skew=hot",
      "rows=48 runs=5 dtype=f32"}},
    {"Layer",
     "Router, dispatch, experts, combine; 64 experts, 6 a token, no shared expert.",
     dpl_bench_run_layer,
     "layer",
     "op dtype rows skew load_max_over_mean median_us gflops limit limit_us fraction fraction_fma",
     "experts=4 top_k=2 d=64 f=32 rows=4 runs=1 mbytes=1",
     {"experts=64 top_k=6 d=2048 f=1408 shared=0 rows=512 runs=3 dtype=bf16",
      "experts=64 top_k=6 d=2048 f=1408 shared=0 rows=512 runs=3 dtype=bf16 skew=zipf",
      "experts=64 top_k=6 d=2048 f=1408 shared=0 rows=512 runs=3 dtype=bf16 skew=hot",
      "experts=16 top_k=4 d=1024 f=512 rows=1024 runs=9 dtype=f32"}},
    {"Training step",
     "Whole optimizer steps. The limit is MaxText's operations over the peak of the type.",
     dpl_bench_run_step,
     "step",
     "config dtype median_ms tokens_per_s gflops limit_ms fraction fraction_fma",
     "runs=1 warmup=0 per_device_batch_size=1 max_target_length=16 base_num_decoder_layers=2",
     {"configs/bench-small.yml dtype=float32", "configs/bench-small.yml dtype=bfloat16",
      "configs/bench-medium.yml dtype=float32 runs=2 warmup=1",
      "configs/bench-medium.yml dtype=bfloat16 runs=2 warmup=1"}},
};

// The words of a text, at most 16, separated by blanks; how many there are.
static int split(char *text, char *words[16]) {
    int n = 0;
    for (char *at = text; n < 16 && (at = strtok(n ? NULL : at, " "));) words[n++] = at;
    return n;
}

static int run_line(const section *s, const char *line, const char *more) {
    char text[256], *words[16];
    dpl_bench_args args = {.argv = words};
    snprintf(text, sizeof text, "%s %s", line, more); // the last value of a key counts
    args.argc = split(text, words);
    fprintf(stderr, "%s: %s\n", s->title, line);
    return s->run(&args);
}

static int run_section(const section *s, bool quick, json_t *rows) {
    int code = 0;
    dpl_bench_collect(rows);
    for (size_t i = 0; s->lines[i] && code == 0 && (i == 0 || !quick); i++)
        code = run_line(s, s->lines[i], quick ? s->quick : "");
    dpl_bench_collect(NULL);
    return code;
}

/* ---- tables ---- */
static void print_cell(FILE *out, const json_t *value) {
    const double x = json_number_value(value);
    if (json_is_string(value)) fprintf(out, " %s |", json_string_value(value));
    else if (!value) fputs(" |", out); // a row may lack some
    else fprintf(out, fabs(x) < 10 && x != floor(x) ? " %.2f |" : " %.0f |", x);
}

static void print_table(FILE *out, const section *s, const json_t *rows) {
    char text[256], *columns[16];
    snprintf(text, sizeof text, "%s", s->columns);
    const int n = split(text, columns);
    fprintf(out, "\n## %s\n\n%s\n\n|", s->title, s->about);
    for (int i = 0; i < n; i++) fprintf(out, " %s |", columns[i]);
    fputs("\n|", out);
    for (int i = 0; i < n; i++) fputs("---|", out);
    for (size_t i_row = 0; i_row < json_array_size(rows); i_row++) {
        const json_t *row = json_array_get(rows, i_row);
        if (strcmp(json_string_value(json_object_get(row, "bench")), s->rows) != 0) continue;
        fputs("\n|", out);
        for (int i = 0; i < n; i++) print_cell(out, json_object_get(row, columns[i]));
    }
    fputc('\n', out);
}

/* ---- the roofline ---- */
// Both axes are logarithmic: operations a byte from 2^-2 to 2^12, GFLOPS from 2^0 to 2^12.
static double plot_x(double flops_per_byte) {
    return 60 + 40 * (log2(fmin(fmax(flops_per_byte, 0.25), 4096)) + 2);
}
static double plot_y(double gflops) {
    return 420 - 32 * log2(fmin(fmax(gflops, 1), 4096));
}

// A grouped GEMM of a type that has a roof here; other rows are not for the picture.
static void plot_product(FILE *out, const json_t *row) {
    static const char *const colours[] = {"#1f77b4", "#d62728", "#2ca02c"}; // forward, dgrad, wgrad
    const char *bench = json_string_value(json_object_get(row, "bench"));
    const char *op = json_string_value(json_object_get(row, "op"));
    const char *dtype = json_string_value(json_object_get(row, "dtype"));
    if (!bench || strcmp(bench, "gemm") != 0 || !op || !dtype) return;
    const bool f32 = strcmp(dtype, "f32") == 0;
    if (!f32 && strcmp(dtype, "bf16") != 0) return;
    const char *colour = colours[*op == 'f' ? 0 : *op == 'd' ? 1 : 2];
    const double y = json_number_value(json_object_get(row, "gflops"));
    const double x = y / json_number_value(json_object_get(row, "gbs"));
    fprintf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"5\" stroke=\"%s\" fill=\"%s\"/>\n", plot_x(x),
            plot_y(y), colour, f32 ? colour : "none");
}

static void plot(FILE *out, const json_t *machine, const json_t *rows) {
    const char *const peaks[] = {"gflops", "gflops_bf16"};
    const double gbs = json_number_value(json_object_get(machine, "read_gbs"));
    fputs("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"680\" height=\"470\" "
          "font-family=\"sans-serif\" font-size=\"12\">\n"
          "<rect width=\"680\" height=\"470\" fill=\"white\"/>\n",
          out);
    for (int i = -2; i <= 12; i += 2)
        fprintf(out,
                "<line x1=\"%.0f\" x2=\"%.0f\" y1=\"36\" y2=\"420\" stroke=\"#ddd\"/>"
                "<text x=\"%.0f\" y=\"436\" text-anchor=\"middle\">%g</text>\n",
                plot_x(exp2(i)), plot_x(exp2(i)), plot_x(exp2(i)), exp2(i));
    for (int i = 0; i <= 12; i += 2)
        fprintf(out,
                "<line x1=\"60\" x2=\"620\" y1=\"%.0f\" y2=\"%.0f\" stroke=\"#ddd\"/>"
                "<text x=\"54\" y=\"%.0f\" text-anchor=\"end\">%g</text>\n",
                plot_y(exp2(i)), plot_y(exp2(i)), plot_y(exp2(i)) + 4, exp2(i));
    for (int i = 0; i < 2; i++) {
        const double peak = json_number_value(json_object_get(machine, peaks[i]));
        fprintf(out,
                "<polyline fill=\"none\" stroke=\"black\"%s points=\"%.0f,%.0f %.0f,%.0f "
                "%.0f,%.0f\"/>\n",
                i ? " stroke-dasharray=\"5\"" : "", plot_x(1 / gbs), plot_y(1), plot_x(peak / gbs),
                plot_y(peak), plot_x(4096), plot_y(peak));
    }
    fputs("<text x=\"340\" y=\"456\" text-anchor=\"middle\">operations a byte of operands and "
          "result</text>\n<text x=\"60\" y=\"24\">grouped GEMM, GFLOPS: "
          "<tspan fill=\"#1f77b4\">forward</tspan> <tspan fill=\"#d62728\">dgrad</tspan> "
          "<tspan fill=\"#2ca02c\">wgrad</tspan>; filled, solid: fp32, open, dashed: bf16</text>\n",
          out);
    for (size_t i = 0; i < json_array_size(rows); i++) plot_product(out, json_array_get(rows, i));
    fputs("</svg>\n", out);
}

static bool write_picture(const char *path, const json_t *rows) {
    char picture[4096];
    const size_t n = strlen(path) - strlen(".md");
    snprintf(picture, sizeof picture, "%.*s.svg", (int)n, path);
    FILE *out = fopen(picture, "w");
    if (out) plot(out, json_array_get(rows, 0), rows);
    if (out && fclose(out) == 0) return true;
    perror(picture);
    return false;
}

// The processor's name, as Linux has it; "" where it says none.
static void find_processor(char *name, size_t size) {
    char line[256];
    FILE *info = fopen("/proc/cpuinfo", "re");
    name[0] = '\0';
    while (info && !name[0] && fgets(line, sizeof line, info)) {
        line[strcspn(line, "\n")] = '\0';
        if (!strncmp(line, "model name", 10) && strchr(line, ':'))
            snprintf(name, size, "%s", strchr(line, ':') + 1);
    }
    if (info) fclose(info);
}

int dpl_bench_run_report(dpl_bench_args *args) {
    const char *path = dpl_bench_word(args);
    const size_t n = path ? strlen(path) : 0;
    if (n < 4 || strcmp(path + n - 3, ".md") != 0) {
        fputs("bench report: expected the name of a file that ends in .md\n", stderr);
        return 2;
    }
    const bool quick = dpl_bench_choice(args, "quick",
                                        (const char *const[]){"false", "true", NULL});
    if (!dpl_bench_args_done(args)) return 2;
    FILE *out = fopen(path, "w");
    if (!out) {
        perror(path);
        return 1;
    }
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char processor[256];
    find_processor(processor, sizeof processor);
    fprintf(out,
            "# Performance\n\nWritten by `make bench`, on this processor:%s. Fractions are of the "
            "limit that it reached in the same run. Other programs beside it, on the same work: "
            "[peers.md](peers.md).\n\n![Roofline](%.*s.svg)\n",
            processor, (int)strlen(name) - 3, name);
    json_t *all = json_array();
    int code = 0;
    for (size_t i = 0; i < DPL_COUNT(sections) && code == 0; i++) {
        json_t *rows = json_array();
        code = run_section(&sections[i], quick, rows);
        if (code == 0) print_table(out, &sections[i], rows);
        json_array_extend(all, rows);
        json_decref(rows);
    }
    if (fclose(out) != 0) code = 1;
    if (code == 0 && !write_picture(path, all)) code = 1;
    json_decref(all);
    return code;
}
