"""The cases of the kernel benchmark: a name, the numbers that make it, and what it must read and multiply at least.

Plain Python: the peer's interpreter imports it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MODELS = {
    "qwen3-0.6b": {"hidden": 1024, "heads": 16, "kv_heads": 8, "size": 128, "inner": 3072, "vocabulary": 151_936},
    "llama3.2-1b": {"hidden": 2048, "heads": 32, "kv_heads": 8, "size": 64, "inner": 8192, "vocabulary": 128_256},
}
MIXTURES = {
    "qwen3-30b-a3b": {"hidden": 2048, "width": 768, "experts": 128, "top_k": 8},
    "gpt-oss-20b": {"hidden": 2880, "width": 2880, "experts": 32, "top_k": 4},
}
ROWS = (1, 8, 32, 64, 512)
GROUPS_OF_EIGHT = {"qwen3-30b-a3b": {"heads": 32, "kv_heads": 4, "size": 128}}
"""Eight heads of a query share one of a key: attention alone."""
BATCHES = (1, 8, 32)
CONTEXTS = (512, 4096)
VOCABULARY = 151_936


@dataclass(frozen=True)
class Case:
    """One measurement."""

    kernel: str
    """Name of the method of a contestant that prepares it."""
    label: str
    numbers: dict[str, int | str] = field(hash=False)
    bytes: int
    """What the kernel reads and writes at least."""
    flops: int
    bound: str
    """What limits it: dram or fma."""

    @property
    def name(self) -> str:
        """One word."""
        return f"{self.kernel}:{self.label}".replace(" ", ",")


def linear_cases() -> list[Case]:
    """Every linear layer of the models, and the head that gives the logits."""
    cases = []
    for model, m in MODELS.items():
        attention = m["heads"] * m["size"]
        shapes = {
            "qkv": (attention + 2 * m["kv_heads"] * m["size"], m["hidden"], ROWS),
            "o": (m["hidden"], attention, ROWS),
            "gate_up": (2 * m["inner"], m["hidden"], ROWS),
            "down": (m["hidden"], m["inner"], ROWS),
            "lm_head": (m["vocabulary"], m["hidden"], (1, 8, 32)),
        }
        for layer, (n, k, rows) in shapes.items():
            for tokens in rows:
                numbers = {"m": tokens, "n": n, "k": k}
                moved, flops = 2 * (n * k + tokens * (n + k)), 2 * tokens * n * k
                bound = "dram" if tokens <= 16 else "fma"
                cases.append(Case("linear", f"{model} {layer} M={tokens}", numbers, moved, flops, bound))
    return cases


def attention_cases() -> list[Case]:
    """Decode over a paged cache, whole prompts, and a chunk of a long one."""
    cases = []
    for model, m in (MODELS | GROUPS_OF_EIGHT).items():
        pair = 4 * m["heads"] * m["size"]
        token = 4 * m["kv_heads"] * m["size"]
        shape = {name: m[name] for name in ("heads", "kv_heads", "size")}
        for dtype, part in (("auto", 1), ("fp8", 2), ("int8_per_token_head", 2)):
            for batch in BATCHES:
                for context in CONTEXTS:
                    numbers = {**shape, "batch": batch, "queries": 1, "context": context, "cache": dtype}
                    label = f"{model} {'bf16' if dtype == 'auto' else dtype} B={batch} context={context}"
                    tokens = batch * context
                    cases.append(Case("decode", label, numbers, tokens * token // part, tokens * pair, "dram"))
        for queries, context in ((128, 128), (512, 512), (2048, 2048), (512, 4096)):
            pairs = queries * (context - queries) + queries * (queries + 1) // 2
            numbers = {**shape, "batch": 1, "queries": queries, "context": context, "cache": "auto"}
            label = f"{model} queries={queries} context={context}"
            cases.append(Case("prefill", label, numbers, context * token, pairs * pair, "fma"))
    for heads in (16, 128):
        for batch in (1, 8):
            numbers = {"heads": heads, "batch": batch, "context": 4096}
            tokens, flops = batch * 4096, batch * 4096 * heads * 2 * (576 + 512)
            bound = "fma"
            cases.append(Case("mla_decode", f"H={heads} B={batch} context=4096", numbers, tokens * 1152, flops, bound))
    return cases


def small_cases() -> list[Case]:
    """What runs between the large kernels."""
    cases = []
    for model, m in MODELS.items():
        for rows in (1, 32, 512):
            hidden, inner = m["hidden"], m["inner"]
            rotated = (m["heads"] + m["kv_heads"]) * m["size"]
            written = m["kv_heads"] * m["size"]
            for kernel, numbers, moved in (
                ("rms_norm", {"width": hidden}, 4 * hidden),
                ("fused_add_rms_norm", {"width": hidden}, 8 * hidden),
                ("silu_and_mul", {"width": inner}, 6 * inner),
                ("gelu_tanh_and_mul", {"width": inner}, 6 * inner),
                ("rotary", {name: m[name] for name in ("heads", "kv_heads", "size")}, 4 * rotated),
                ("cache_write", {name: m[name] for name in ("kv_heads", "size")}, 8 * written),
            ):
                cases.append(Case(kernel, f"{model} M={rows}", {**numbers, "rows": rows}, rows * moved, 0, "dram"))
    return cases


def sampling_cases() -> list[Case]:
    """From logits to a token."""
    return [
        Case(kernel, f"B={batch}", {"batch": batch}, 4 * batch * VOCABULARY, 0, "dram")
        for kernel in ("argmax", "top_k", "top_p", "top_k_top_p")
        for batch in (1, 32)
    ]


def expert_cases() -> list[Case]:
    """The routed experts of one layer; each call chooses others."""
    cases = []
    for model, m in MIXTURES.items():
        expert = 3 * m["hidden"] * m["width"]
        for tokens in (1, 8, 32, 512):
            chosen = round(m["experts"] * (1 - (1 - m["top_k"] / m["experts"]) ** tokens))
            flops = 2 * tokens * m["top_k"] * expert
            bound = "dram" if tokens * m["top_k"] <= 8 * m["experts"] else "fma"
            cases.append(
                Case("experts", f"{model} M={tokens}", {**m, "tokens": tokens}, 2 * chosen * expert, flops, bound)
            )
    return cases


def lora_cases() -> list[Case]:
    """The adapters of Llama-3.2-1B's queries, keys and values, of rank 16: one adapter, or four in one batch."""
    m = MODELS["llama3.2-1b"]
    columns, hidden = (m["heads"] + 2 * m["kv_heads"]) * m["size"], m["hidden"]
    cases = []
    for adapters in (1, 4):
        for tokens in (1, 8, 32, 512):
            flops = 2 * tokens * 16 * (3 * hidden + columns)
            moved = 2 * min(adapters, tokens) * 16 * (3 * hidden + columns) + 4 * tokens * columns + 2 * tokens * hidden
            numbers = {"adapters": adapters, "tokens": tokens, "hidden": hidden, "rank": 16, "size": m["size"]}
            numbers |= {name: m[name] for name in ("heads", "kv_heads")}
            label, bound = f"adapters={adapters} M={tokens}", "dram" if tokens <= 32 else "fma"
            cases.append(Case("lora", label, numbers, moved, flops, bound))
    return cases


CASES = [
    *linear_cases(),
    *attention_cases(),
    *expert_cases(),
    *lora_cases(),
    *small_cases(),
    *sampling_cases(),
]
