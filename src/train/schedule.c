// schedule.c - the learning rate of a step: MaxText's cosine and warm-up/stable/decay curves.
//
// The index is the number of updates already made, so step 0 has rate 0 when there is a warm-up.
// Every division is guarded: any combination of fractions and lengths gives a finite rate.
#include <math.h>

#include "train/train.h"

void dpl_schedule_init(const dpl_options *o, int64_t length, dpl_schedule *s) {
    s->length = length;
    s->warmup = (int64_t)((double)length * o->warmup_steps_fraction);
    s->first = o->learning_rate;
    s->last = o->learning_rate * o->learning_rate_final_fraction;
    s->wsd = dpl_is(o->lr_schedule_type, "wsd");
    s->linear = dpl_is(o->wsd_decay_style, "linear");
    s->decay = length - s->warmup; // it must not reach into the warm-up: the curve would jump
    if (s->wsd)
        s->decay = DPL_MIN(s->decay, (int64_t)((double)length * o->wsd_decay_steps_fraction));
}

double dpl_schedule_rate(const dpl_schedule *s, int64_t step) {
    if (step >= s->length) return 0;
    if (step < s->warmup) return s->first * (double)step / (double)s->warmup;
    const int64_t into = step - (s->length - s->decay);
    if (into < 0) return s->first;
    const double part = s->decay > 1 ? (double)into / (double)(s->decay - 1) : 1;
    const double a = s->wsd && s->linear ? 1 - part : (1 + cos(M_PI * part)) / 2;
    return s->first * a + s->last * (1 - a);
}
