#!/usr/bin/env python3
"""Times a training step of transformers' DeepseekV3ForCausalLM beside `dropless bench step`: the
same sizes, batch and optimizer, on the same threads; fp32, and bf16 under autocast with fp32
weights; as written, and through torch.compile.

    bench/compare/torch_step.py configs/bench-small.yml [--rounds N] [--steps N]

Needs torch, transformers and pyyaml; torch.compile also a C++ compiler.
"""
import argparse
import contextlib
import sys

from peers import Table, dropless, median_ms, need, processor, threads

torch, transformers, yaml = need("torch", "transformers", "yaml")
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def model_of(c):
    """The model of a configuration file of ours; what it does not say does not change the speed."""
    config = transformers.DeepseekV3Config(
        vocab_size=c["vocab_size"], hidden_size=c["base_emb_dim"],
        num_hidden_layers=c["base_num_decoder_layers"],
        first_k_dense_replace=c["first_num_dense_layers"], intermediate_size=c["base_mlp_dim"],
        moe_intermediate_size=c["base_moe_mlp_dim"], n_routed_experts=c["num_experts"],
        num_experts_per_tok=c["num_experts_per_tok"], n_shared_experts=c["shared_experts"],
        num_attention_heads=c["base_num_query_heads"],
        num_key_value_heads=c["base_num_query_heads"], q_lora_rank=c["q_lora_rank"],
        kv_lora_rank=c["kv_lora_rank"], qk_nope_head_dim=c["qk_nope_head_dim"],
        qk_rope_head_dim=c["qk_rope_head_dim"], v_head_dim=c["v_head_dim"],
        n_group=1, topk_group=1, routed_scaling_factor=c["routed_scaling_factor"],
        norm_topk_prob=c["norm_topk_prob"], num_mtp_layers=0, use_cache=False,
        max_position_embeddings=c["max_position_embeddings"], pad_token_id=None)
    config._attn_implementation = "sdpa"
    return transformers.DeepseekV3ForCausalLM(config).train()


def tokens_of(c):
    """The ids of one batch and one more each row: of the text if there is one, else made up."""
    shape = (int(c["per_device_batch_size"]), c["max_target_length"] + 1)
    n = shape[0] * shape[1]
    try:
        text = torch.frombuffer(bytearray(open(c.get("dataset_path", ""), "rb").read(n)),
                                dtype=torch.uint8)
        return text.long().reshape(shape)
    except OSError:
        return torch.randint(c["vocab_size"], shape)


class Trainer:
    def __init__(self, c):
        self.model, self.tokens = model_of(c), tokens_of(c)
        self.clip = c.get("gradient_clipping_threshold", 1.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95),
                                           weight_decay=0.1, fused=True)
        self.compiled = torch.compile(self.loss)

    def loss(self, x, y):
        logits = self.model(x).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def step(self, dtype, compiled, experts):
        self.model.set_experts_implementation(experts)
        loss_fn = self.compiled if compiled else self.loss
        bf16 = dtype == "bf16"
        with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = loss_fn(self.tokens[:, :-1], self.tokens[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="a round")
    args = parser.parse_args()
    torch.set_num_threads(threads())
    torch.manual_seed(1)
    with open(args.config) as file:
        trainer = Trainer(yaml.safe_load(file))
    n_params = sum(p.numel() for p in trainer.model.parameters())
    n_ours = dropless("inspect", args.config)[0]["parameters"]["total"]
    if n_params != n_ours:
        sys.exit(f"{args.config}: {n_ours} parameters in dropless, {n_params} in transformers")
    # A loop over experts, or torch's grouped product; through the compiler only the latter, since
    # the loop depends on the data.
    peers = {"torch, expert loop": (False, "eager"), "torch, grouped_mm": (False, "grouped_mm"),
             "torch.compile, grouped_mm": (True, "grouped_mm")}
    table, failed = Table(), set()
    for _ in range(args.rounds):
        for name, key in DTYPES.items():
            ours = dropless("bench", "step", args.config, f"dtype={key}", f"runs={args.steps}",
                            "warmup=1")
            table.add(name, "dropless", ours[0]["median_ms"])
            for who, how in peers.items():
                if (name, who) in failed:
                    continue
                try:
                    table.add(name, who, median_ms(lambda: trainer.step(name, *how), args.steps))
                except Exception as e:  # a peer that cannot do it is a result
                    failed.add((name, who))
                    print(f"{name}: {who} failed: {e}", file=sys.stderr)
    table.print(f"A training step of {args.config}\n\n{processor()}; torch {torch.__version__}, "
                f"transformers {transformers.__version__}")
    for name, who in sorted(failed):
        print(f"{name}: {who} failed (see above)")


if __name__ == "__main__":
    main()
