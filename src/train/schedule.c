// schedule.c - the learning rate of a step: MaxText's cosine and warm-up/stable/decay curves.
//
// The index is the number of updates already made, so step 0 has rate 0 when there is a warm-up.
// Every division is guarded: any combination of fractions and lengths gives a finite rate.
#include <math.h>

#include "train/train.h"

double dpl_schedule_rate(const dpl_options *o, int64_t length, int64_t step) {
    const bool wsd = dpl_is(o->lr_schedule_type, "wsd");
    const double first = o->learning_rate, last = first * o->learning_rate_final_fraction;
    const int64_t warmup = (int64_t)((double)length * o->warmup_steps_fraction);
    int64_t decay = length - warmup; // it must not reach into the warm-up: the curve would jump
    if (wsd) decay = DPL_MIN(decay, (int64_t)((double)length * o->wsd_decay_steps_fraction));
    if (step >= length) return 0;
    if (step < warmup) return first * (double)step / (double)warmup;
    const int64_t into = step - (length - decay);
    if (into < 0) return first;
    const double part = decay > 1 ? (double)into / (double)(decay - 1) : 1;
    const bool linear = wsd && dpl_is(o->wsd_decay_style, "linear");
    const double a = linear ? 1 - part : (1 + cos(M_PI * part)) / 2;
    return first * a + last * (1 - a);
}
