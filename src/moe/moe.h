// moe.h - one dropless MoE layer: router -> permute -> dispatch -> experts -> combine, and back.
//
// Nothing is dropped at any load and memory is used for exactly the rows that arrive. What the
// forward pass keeps for the backward pass belongs to the caller (dpl_moe_saved), not to the layer:
// forward and backward calls of any layers may interleave.
#pragma once

#include "comm/window.h"
#include "cpu/ops.h"

typedef struct dpl_moe_shape {
    size_t d, f, shared_f; // shared_f 0: no shared expert; else its width (n_shared * f)
    dpl_route_rule rule;   // E and K are in it
    dpl_dtype dtype; // of activations between GEMMs; BF16: of operands too, but for the router's
    bool mx_wire;    // rows of tokens and their gradients go to the experts in MXFP8 (dtype BF16)
} dpl_moe_shape;

typedef struct dpl_moe_weights {
    dpl_weight router;        // (E, D) F32 always
    const float *bias;        // (E) or NULL; F32 always
    dpl_weight gate_up, down; // (EL, 2*round_up(F,16), D) interleaved by 16; (EL, D, F)
    dpl_weight shared_gate_up, shared_down; // one group each; unused when shared_f is 0
} dpl_moe_weights;

// Where what is kept for backward lies: memory of the caller, or, where a pointer to this is NULL,
// the step arena. With p NULL nothing is taken and only the bytes are counted.
typedef struct dpl_moe_memory {
    uint8_t *p; // DPL_ALIGN-aligned
    size_t used_bytes;
} dpl_moe_memory;

// What the host must know of a routing, computed by operators and read back in one piece.
typedef struct dpl_moe_report {
    double aux[2];   // balance loss and router z-loss, weighted
    int32_t bad_row; // the first token whose logits are not finite, or -1
    int32_t unused;
    int64_t offsets[]; // (chunks, E + 1), of the sorted rows of this rank
} dpl_moe_report;

// The ranks over which experts are spread, each of which has some in a row. Rows that ranks write
// into each other's memory, or read there, are blocks of the window.
typedef struct dpl_ep_ranks {
    dpl_comm *comm;
    dpl_window *window; // NULL with one rank
    size_t n_experts;
    size_t n_chunks;     // in which the tokens of a call go, equal on all ranks; 0: 1
    bool reduces;        // a layer's rows are summed on their host before they go to another one
    size_t *first;       // (R + 1): rank r has the experts first[r] .. first[r+1]-1
    size_t memory_bytes; // of this machine: rows that it cannot hold are refused
    // With more ranks than one, tables:
    size_t n_hosts;  // whose ranks have memory in common
    int *host;       // (R): number of its host
    dpl_comm *batch; // all ranks with rows of a micro-batch, `comm`'s among them; NULL: this one
    int *owner;      // (E): the rank that has it
    size_t *host_expert; // (E): experts by host, then by number
    size_t *host_first;  // (H + 1): where those of a host begin there
    int *partner;        // (H): the rank of a host that stands in there for this one
    int *served;         // (n_served): ranks of other hosts that this one stands in for
    size_t n_served;
    bool has_mates;               // some host has more ranks than one
    size_t *mate_at, *mate_bytes; // (R): a byte for each other rank of this host
    uint8_t *marks;               // (2, R): those bytes, there and back
} dpl_ep_ranks;

// A run of consecutive tokens, which goes to the experts and back by itself. The same on all ranks:
// how many there are. Rows of a rank lie by chunk, then expert, then source rank, then token.
typedef struct dpl_ep_chunk {
    size_t first, n_tokens;   // of the tokens of this rank
    size_t first_row, n_rows; // of the rows received
    const int32_t *ids;       // (T*K) of this chunk, device; so are the next two:
    int32_t *slot_row; // row of a slot among the sorted ones that this rank sends, -1 skipped
    int32_t *row_slot; // and back
    int64_t *offsets;  // (EL + 1), device: of the rows received, from first_row on
    // With more ranks than one:
    dpl_place *place; // (E), device: where the rows of this rank go
    int64_t *row_at;  // (R + 1, E): the row of an expert's rank where those of a source rank begin
    // With more hosts than one (remote.c):
    int64_t *n_unique;     // (R, H): tokens of each rank that go to each host
    int32_t *unique_token; // (sum of this rank's n_unique), device: which, host by host
    int32_t *row_unique;   // (T*K), device: K times which of those of its host a sorted row is, + k
    int64_t *sorted;       // (E + 1): sorted rows of this rank
    // Where their sums return (`reduces`), device:
    int32_t *home_row; // (T*K): as slot_row; of a host's sum at the first of its slots
    int32_t *served_ids, *served_row; // (tokens, K) of the ranks that this one stands in for
} dpl_ep_chunk;

// The expert-parallel exchange of one call. Arrays are host memory unless they say otherwise.
typedef struct dpl_ep {
    const dpl_ep_ranks *ranks;
    size_t n_tokens, top_k, n_experts, n_local;
    size_t n_rows; // N: rows received
    size_t n_chunks;
    dpl_ep_chunk *chunks;   // (n_chunks); with one rank there is one
    int64_t *counts;        // (E): tokens of this rank that chose each expert
    dpl_moe_report *report; // device
} dpl_ep;

// A gated MLP on N rows: the experts; with one group and no row weights a shared expert, a dense
// MLP.
typedef struct dpl_mlp {
    dpl_groups groups;
    dpl_weight gate_up_w, down_w; // as in dpl_moe_weights
    dpl_mat x;                    // (N, D), or with a map (T, D)
    dpl_row_map map;
    float *row_weight;       // (N), NULL: 1
    dpl_mat gate_up, hidden; // (N, 2F'), (N, F) after SwiGLU and row weight: kept for backward
} dpl_mlp;

// Belongs to the caller: any number of calls may be between forward and backward.
typedef struct dpl_moe_saved {
    float *logits, *score; // (T, E)
    int32_t *ids;          // (T, K), -1: skipped
    float *weights;        // (T, K)
    dpl_ep ep;
    dpl_mlp experts, shared; // blocks kept by forward, each with what it was called with
    void *rows;              // with more ranks than one: the block of the window that experts.x is
    double aux[2];           // balance loss and router z-loss, host, weighted
    // Of batch losses over several ranks, for which aux is this rank's part; else NULL:
    double *sums, *all; // (dpl_aux_n_sums()) of its rows, and of those of all ranks
} dpl_moe_saved;

/* ---- wire.c ---- */
size_t dpl_wire_width(size_t d); // of a row that is on its way, in bf16
// x (rows, d) for the way, in the step's memory; back, in BF16; and both.
dpl_mat dpl_wire_pack(dpl_ctx *ctx, dpl_mat x, size_t n_rows, size_t d);
void dpl_wire_unpack(dpl_ctx *ctx, dpl_mat wire, size_t n_rows, size_t d, dpl_mat y);
void dpl_wire_round(dpl_ctx *ctx, dpl_mat x, size_t n_rows, size_t d, dpl_mat y);

/* ---- router.c ---- */
// Logits, choice, weights; auxiliary losses if aux is not NULL. Fills blocks that `saved` has.
void dpl_router_forward(dpl_ctx *ctx, const dpl_moe_shape *shape, const dpl_moe_weights *weights,
                        dpl_mat x, const int32_t *segment, const dpl_aux *aux,
                        const dpl_moe_saved *saved);
// dx (T, D) F32 += ; dweights (T, K) from the experts.
void dpl_router_backward(dpl_ctx *ctx, const dpl_moe_shape *shape, const dpl_moe_weights *weights,
                         dpl_mat x, const dpl_aux *aux, const dpl_moe_saved *saved,
                         const float *dweights, dpl_mat dx);

// Batch losses over several ranks: adds up their sums; else does nothing. Collective over the ranks
// of the batch, of which each goes on as all do; `mine`: what this one has found so far.
dpl_status dpl_router_meet(dpl_ctx *ctx, const dpl_moe_shape *shape, const dpl_aux *aux,
                           dpl_status mine, dpl_moe_saved *saved);
// The ranks over which losses of this kind are; NULL: this one alone.
static inline dpl_comm *dpl_ep_batch(const dpl_ep_ranks *ranks, dpl_balance_kind kind) {
    const bool spread = ranks->batch && ranks->batch->n_ranks > 1;
    return spread && kind == DPL_BALANCE_BATCH ? ranks->batch : NULL;
}

/* ---- permute.c ---- */
// A block that is kept for backward.
void *dpl_moe_keep(dpl_ctx *ctx, dpl_moe_memory *memory, size_t bytes);
dpl_mat dpl_moe_mat(dpl_ctx *ctx, dpl_moe_memory *memory, size_t n_rows, size_t width,
                    dpl_dtype dtype);
// DPL_EINVAL: more slots (T*K) than row numbers.
dpl_status dpl_ep_check_slots(size_t n_tokens, size_t top_k);
// DPL_EINVAL names the token of an id that is out of range or chosen twice. ids: (T, K), host.
dpl_status dpl_ep_check_ids(const int32_t *ids, size_t n_tokens, size_t top_k, size_t n_experts);
dpl_ep dpl_ep_alloc(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_ep_ranks *ranks, size_t top_k,
                    size_t n_tokens);
// ids (T, K), distinct within a token: submits the permutation, reads the report back (the one
// read-back of a layer), agrees on errors, exchanges the counts. `mine`: what this rank has found
// so far. aux_out NULL: no router has run. Collective.
dpl_status dpl_moe_prepare(dpl_ctx *ctx, const int32_t *ids, dpl_status mine, dpl_ep *ep,
                           double aux_out[2]);

/* ---- ranks.c ---- */
// comm NULL: one rank. n_local (R): how many experts each rank has; NULL: as equal as can be.
// Ranks of one machine whose `island` is the same are one host; below 0 each is one by itself.
// Collective. `ranks` is zero before, and closed by the caller after a failure.
// `form` is of what else must be equal on all ranks, such as the width of rows: DPL_EINVAL names a
// rank where something differs. `mine`: what this rank has found so far.
dpl_status dpl_ep_ranks_open(dpl_ctx *ctx, dpl_comm *comm, size_t n_experts, const size_t *n_local,
                             int island, uint64_t form, dpl_status mine, dpl_ep_ranks *ranks);
void dpl_ep_ranks_close(dpl_ep_ranks *ranks);
static inline bool dpl_ep_is_spread(const dpl_ep_ranks *ranks) {
    return ranks->comm->n_ranks > 1;
}
static inline size_t dpl_ep_local_experts(const dpl_ep_ranks *ranks) {
    return ranks->first[ranks->comm->rank + 1] - ranks->first[ranks->comm->rank];
}
// N rows of the window with a number for each behind them. DPL_ENOMEM.
dpl_status dpl_ep_rows_alloc(const dpl_ep *ep, size_t d, dpl_dtype dtype, dpl_mat *rows_out,
                             float **values_out);
void dpl_ep_rows_free(const dpl_ep *ep, void *rows);
void dpl_ep_forget(const dpl_ep_ranks *ranks); // frees all blocks of the window

/* ---- rows on their way, chunk by chunk ---- */
// Whether numbers go along is the same on all ranks, else DPL_EINVAL; a rank that has none to give
// and none to take may leave it to the others.
typedef enum dpl_ep_numbers { DPL_EP_NONE, DPL_EP_WANTED, DPL_EP_ANY } dpl_ep_numbers;

typedef struct dpl_mail { // messages to and from each rank: (R) each
    size_t *send_at, *send_bytes, *receive_at, *receive_bytes;
    uint8_t *send, *receive;
} dpl_mail;
typedef struct dpl_flight { // of a chunk
    dpl_mail mail;
    dpl_ticket bulk, signal; // of messages between hosts; of the ranks of this host
} dpl_flight;

// One direction: tokens to the experts, or rows back. With more ranks than one, rows and numbers
// are those of a block that dpl_ep_rows_alloc() gave.
typedef struct dpl_ep_move {
    const dpl_ep *ep;
    size_t d;               // 0: only numbers move (with one rank)
    dpl_mat rows;           // (N, D)
    float *values;          // (N)
    dpl_ep_numbers numbers; // that go along
    dpl_phase phase;        // that its operators are counted under
    // By dpl_ep_meet():
    void **peer_rows;    // (R), of the ranks of this host, else NULL
    float **peer_values; // (R), or NULL: no numbers go along
    dpl_flight *flights; // (chunks)
} dpl_ep_move;

// The rows of slots of a chunk, where they lie on the ranks of this host.
dpl_spread dpl_ep_spread(const dpl_ep_move *move, size_t chunk);
// Before the first chunk of all moves of a pass: all ranks are there, agree on errors (`mine`: what
// this one has found) and tell where their rows lie. The only meeting: what follows waits for what
// it needs. Takes memory of the arena. Collective.
dpl_status dpl_ep_meet(dpl_ctx *ctx, dpl_status mine, dpl_ep_move *moves, size_t n_moves);
// What a chunk waits for has come: waiting for it takes no time. Makes progress.
bool dpl_ep_has_arrived(const dpl_ep_move *move, size_t chunk);
// A sign to the other ranks of this host that what this one has queued is done, which it waits for;
// the ticket is of theirs. Where every host has one rank there is none.
dpl_status dpl_ep_signal(dpl_ctx *ctx, const dpl_ep *ep, dpl_ticket *ticket_out);

/* ---- dispatch.c, combine.c: each is the gradient of the other ---- */
// Chunks are started and waited for in their order, and all ranks start the same after the same.
// Matrices are of all tokens, a call touches those of its chunk.
// rows (N, D) = those of their tokens; values (N) = weights of their slots.
dpl_status dpl_moe_dispatch_start(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk, dpl_mat x,
                                  const float *weights);
dpl_status dpl_moe_dispatch_wait(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk);
// Rows of the chunk are computed; met: on all ranks.
dpl_status dpl_moe_combine_start(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk, bool met);
// y (T, D) = the sum of the K rows of a token in slot order, or += with accumulate (y F32).
// slot_value (T, K) = values of their rows, 0 where skipped.
dpl_status dpl_moe_combine_wait(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk,
                                bool accumulate, dpl_mat y, float *slot_value);
// After the last chunk: none reads these rows any more.
dpl_status dpl_moe_combine_end(dpl_ctx *ctx, const dpl_ep_move *move);

// All chunks at once, meeting included. Collective; what a peer found is returned by all.
dpl_status dpl_moe_dispatch(dpl_ctx *ctx, const dpl_ep *ep, dpl_status mine, dpl_mat x,
                            const float *weights, dpl_ep_numbers numbers, size_t d, dpl_mat rows,
                            float *row_weight);
dpl_status dpl_moe_combine(dpl_ctx *ctx, const dpl_ep *ep, dpl_status mine, dpl_mat rows,
                           float *row_value, dpl_ep_numbers numbers, size_t d, bool accumulate,
                           dpl_mat y, float *slot_value);

/* ---- remote.c: rows between hosts ---- */
// What this rank sends to other hosts: fills its n_unique (H) and the two lists. ids: (T, K), host.
void dpl_remote_plan(dpl_ctx *ctx, const int32_t *ids, const dpl_ep *ep, dpl_ep_chunk *chunk,
                     int64_t *n_unique);
// Tokens to the ranks that stand in for the experts of other hosts, and from there to their ranks.
dpl_status dpl_remote_dispatch(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk, dpl_mat x,
                               const float *weights);
void dpl_remote_deliver(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk);
// Rows of this host back to other hosts. When they have come, `spread` gets those of this rank; its
// values may be in slot_value then, and NULL.
dpl_status dpl_remote_return(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk);
void dpl_remote_receive(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk, dpl_spread *spread,
                        float *slot_value);
// What `reduces` takes, after prepare.
void dpl_remote_keep(dpl_ctx *ctx, const dpl_ep *ep);

/* ---- experts.c ---- */
void dpl_experts_forward(dpl_ctx *ctx, const dpl_mlp *mlp, dpl_mat y);
// The way back in three parts: dgate_up (N, 2F') and drow_weight; the weights' gradients, which may
// come later; dx = (or += with accumulate, F32).
dpl_mat dpl_experts_dgate_up(dpl_ctx *ctx, const dpl_mlp *mlp); // a block of the arena
void dpl_experts_gate_backward(dpl_ctx *ctx, const dpl_mlp *mlp, dpl_mat dy, dpl_mat dgate_up,
                               float *drow_weight);
void dpl_experts_wgrad(dpl_ctx *ctx, const dpl_mlp *mlp, dpl_mat dy, dpl_mat dgate_up);
void dpl_experts_dgrad(dpl_ctx *ctx, const dpl_mlp *mlp, dpl_mat dgate_up, dpl_mat dx,
                       bool accumulate);
// All of it. Without accumulate dx may be dy. Temporaries come from the arena.
void dpl_experts_backward(dpl_ctx *ctx, const dpl_mlp *mlp, dpl_mat dy, dpl_mat dx, bool accumulate,
                          float *drow_weight);

/* ---- layer.c: the whole path, shared expert included ---- */
// Bytes of memory that are enough for any routing of n_tokens, with one rank.
size_t dpl_moe_saved_bytes(const dpl_moe_shape *shape, size_t n_tokens);
// y (T, D) = routed + shared. The blocks of `saved` come from `memory`. Collective, with batch
// losses over all ranks of the batch, which then also fail together.
dpl_status dpl_moe_forward_in(dpl_ctx *ctx, const dpl_ep_ranks *ranks, const dpl_moe_shape *shape,
                              const dpl_moe_weights *weights, dpl_mat x, size_t n_tokens,
                              const int32_t *segment, const dpl_aux *aux, dpl_moe_memory *memory,
                              dpl_moe_saved *saved_out, dpl_mat y);
// dx (T, D) F32, written. dy is read only.
dpl_status dpl_moe_backward(dpl_ctx *ctx, const dpl_moe_shape *shape,
                            const dpl_moe_weights *weights, dpl_mat x, const dpl_aux *aux,
                            const dpl_moe_saved *saved, dpl_mat dy, dpl_mat dx);
void dpl_moe_forget(dpl_moe_saved *saved); // the rows that it has in the window
