// rng.c - counter-based random numbers (Philox4x32-10, Salmon et al. 2011) and the 64-bit hash.
//
// A draw is a pure function of (seed, stream, counter): no state to keep, save or share, and the
// same element gets the same value whichever thread draws it. The seed is the key; counter and
// stream are the two halves of the 128-bit counter.
#include <math.h>

#include "base/base.h"

static void philox(uint64_t seed, uint64_t stream, uint64_t counter, uint64_t out[2]) {
    uint32_t x0 = (uint32_t)counter, x1 = (uint32_t)(counter >> 32);
    uint32_t x2 = (uint32_t)stream, x3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)x0 * 0xd2511f53u;
        const uint64_t b = (uint64_t)x2 * 0xcd9e8d57u;
        x0 = (uint32_t)(b >> 32) ^ x1 ^ k0;
        x1 = (uint32_t)b;
        x2 = (uint32_t)(a >> 32) ^ x3 ^ k1;
        x3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    out[0] = (uint64_t)x1 << 32 | x0;
    out[1] = (uint64_t)x3 << 32 | x2;
}

// 52 bits and a half: with 53 the largest value would round up to 1.
static double to_uniform(uint64_t bits) {
    return ((double)(bits >> 12) + 0.5) * 0x1p-52;
}

uint64_t dpl_rng_u64(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint64_t x[2];
    philox(seed, stream, counter, x);
    return x[0];
}

uint16_t dpl_rng_bits(uint64_t seed, uint64_t stream, uint64_t i) {
    uint64_t x[2];
    const uint64_t word = i / 16 % 8;
    philox(seed, stream, i / 128 * 16 + i % 16, x);
    return (uint16_t)(x[word / 4] >> word % 4 * 16);
}

double dpl_rng_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
    return to_uniform(dpl_rng_u64(seed, stream, counter));
}

double dpl_rng_normal(uint64_t seed, uint64_t stream, uint64_t counter) {
    const double two_pi = 6.283185307179586476925;
    uint64_t x[2];
    philox(seed, stream, counter, x);
    return sqrt(-2.0 * log(to_uniform(x[0]))) * cos(two_pi * to_uniform(x[1]));
}

/* ---- hash ----------------------------------------------------------------------------------- */
// Odd multipliers, so that each step below can be undone: a change in a single word always changes
// the hash. Four lanes hide the latency of the multiplications.
static const uint64_t M0 = 0x9e3779b97f4a7c15u, M1 = 0xbf58476d1ce4e5b9u, M2 = 0x94d049bb133111ebu;

static uint64_t load64(const unsigned char *p, size_t bytes) {
    uint64_t x = 0;
    memcpy(&x, p, bytes);
    return x;
}

static uint64_t absorb(uint64_t state, uint64_t word) {
    state += word * M0;
    return (state << 29 | state >> 35) * M1;
}

static uint64_t avalanche(uint64_t x) {
    x = (x ^ x >> 30) * M1;
    x = (x ^ x >> 27) * M2;
    return x ^ x >> 31;
}

uint64_t dpl_hash64(const void *data, size_t bytes, uint64_t seed) {
    const unsigned char *p = data;
    uint64_t hash = avalanche(seed + M0) + (uint64_t)bytes * M2;
    if (bytes >= 32) {
        uint64_t lane[4];
        for (unsigned i = 0; i < 4; i++) lane[i] = avalanche(hash + (i + 1) * M0);
        for (; bytes >= 32; bytes -= 32, p += 32)
            for (unsigned i = 0; i < 4; i++) lane[i] = absorb(lane[i], load64(p + 8 * i, 8));
        for (unsigned i = 0; i < 4; i++) hash = absorb(hash, avalanche(lane[i]));
    }
    for (; bytes >= 8; bytes -= 8, p += 8) hash = absorb(hash, avalanche(load64(p, 8)));
    if (bytes > 0) hash = absorb(hash, avalanche(load64(p, bytes)));
    return avalanche(hash);
}
