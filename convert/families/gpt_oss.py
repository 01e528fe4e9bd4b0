"""gpt-oss in BF16: fused experts stored transposed, gate and up interleaved, with biases. Its MXFP4 form is refused."""

from __future__ import annotations

from pagestone.convert.family import ATTENTION, NORMS, OUTER, Family, Fused, in_layers

FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    router="mlp.router.weight",
    loads_parts=False,
    fused=Fused(
        transposed=True,
        interleaved=True,
        gate_up_bias="mlp.experts.gate_up_proj_bias",
        down_bias="mlp.experts.down_proj_bias",
    ),
    count_fields=("num_local_experts", "num_experts"),
    size_fields=("intermediate_size",),
    known=(*OUTER, *in_layers(NORMS, ATTENTION, r"mlp\.router\.(weight|bias)")),
)
