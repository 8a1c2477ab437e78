#!/usr/bin/env python3
"""Trains transformers' DeepseekV3ForCausalLM from the first weights and on the batches of a run of
dropless, and prints both losses: what one learns, so must the other.

    build/dropless train configs/bench-small.yml run_name=peer enable_data_shuffling=false \
        max_num_checkpoints_to_keep=0
    bench/compare/learning.py runs/peer

Needs torch, transformers and pyyaml. The run must be of text, in the order of the text, without
multi-token prediction, balance losses or bias updates, and must have its checkpoint 0: with a
warm-up, step 0 changes no weight.
"""
import json
import math
import sys
import time

import torch
import yaml
from transformers import DeepseekV3ForCausalLM


def learning_rate(c, step, n_steps):
    warmup = int(n_steps * c["warmup_steps_fraction"])
    if step < warmup:
        return c["learning_rate"] * step / warmup
    part = (step - warmup) / (n_steps - warmup - 1)
    a = (1 + math.cos(math.pi * part)) / 2
    return c["learning_rate"] * (a + c["learning_rate_final_fraction"] * (1 - a))


def window(tokens, first, n):
    """n ids and targets; where the text ends there is no target."""
    x = torch.zeros(n, dtype=torch.long)
    y = torch.full((n,), -100)
    k = min(n, len(tokens) - 1 - first)
    x[:k] = tokens[first : first + k]
    y[:k] = tokens[first + 1 : first + 1 + k]
    return x, y


def rows(tokens, samples, n):
    pairs = [window(tokens, i * n, n) for i in samples]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def loss_of(model, x, y, reduction):
    logits = model(x).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model, tokens, n):
    model.eval()
    total = count = 0
    n_windows = (len(tokens) - 2) // n + 1
    for i in range(0, n_windows, 64):
        x, y = rows(tokens, range(i, min(i + 64, n_windows)), n)
        total += loss_of(model, x, y, "sum").item()
        count += (y >= 0).sum().item()
    model.train()
    return total / count


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    run = sys.argv[1]
    c = yaml.safe_load(open(f"{run}/config.yml"))
    if c["enable_data_shuffling"] or c["dataset_type"] != "text" or c["dtype"] != "float32":
        sys.exit(f"{run}: expected fp32, text, and enable_data_shuffling=false")
    ours, evals = {}, {}
    for line in open(f"{run}/metrics.jsonl"):
        row = json.loads(line)
        if "eval_loss" in row:
            evals[row["step"]] = row["eval_loss"]
        else:
            ours[row["step"]] = row["lm_loss"]

    text = torch.frombuffer(bytearray(open(c["dataset_path"], "rb").read()), dtype=torch.uint8)
    n_eval = int(len(text) * c["eval_split_fraction"])
    train, held_out = text[: len(text) - n_eval].long(), text[len(text) - n_eval :].long()
    n, n_rows = c["max_target_length"], int(c["per_device_batch_size"])
    n_windows = (len(train) - 2) // n + 1

    model = DeepseekV3ForCausalLM.from_pretrained(f"{run}/checkpoints/0", dtype=torch.float32)
    model.train()
    betas = (c["adam_b1"], c["adam_b2"])
    decay = c["adam_weight_decay"]
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=decay)
    start = time.time()
    for step in range(c["steps"]):
        x, y = rows(train, [(step * n_rows + r) % n_windows for r in range(n_rows)], n)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(c, step, c["steps"])
        loss = loss_of(model, x, y, "mean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c["gradient_clipping_threshold"])
        optimizer.step()
        line = f"step {step}: dropless {ours[step]:.5f}, transformers {loss.item():.5f}"
        if step in evals and c["eval_steps"] == -1:
            line += f"; held out: {evals[step]:.4f}, {evaluate(model, held_out, n):.4f}"
        if step < 5 or step % 20 == 0 or step in evals:
            print(f"{line}, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
