"""Formats of checkpoints that are known and not read, to refuse them by name. Who reads one takes it off here."""

TAILS = {
    "MXFP4": r"_proj_(blocks|scales)",
    "NVFP4": r"\.(weight_scale_2|weight_global_scale|input_global_scale)",
    "a packed compressed-tensors format (int4, NVFP4 or MXFP4)": r"\.(weight_packed|weight_shape|weight_g_idx)",
    "GPTQ or AWQ": r"\.(qweight|qzeros|g_idx)",
    "bitsandbytes": r"\.(SCB|weight_format|weight\.(nested_)?(absmax|quant_map)|weight\.quant_state\.\w+)",
    "EXL2": r"\.q_(weight|scale|scale_max|groups|group_map|perm|invperm)",
    "EXL3": r"\.(trellis|suh|svh|mcg|mul1)",
    "HQQ": r"\.W_q",
    "AQLM": r"\.codebooks",
    "quanto": r"\.weight\._(data|scale|shift|zeropoint)(\.\w+)*",
    "torchao": r"(:|\._weight_)_?(qdata|data|scale|scale_and_zero|zero_point)",
    "MLX": r"\.switch_(mlp|glu)\.\w+\.(weight|scales|biases)",
}
"""Format by the end of a tensor's name. MLX also shifts and transposes dense tensors, so none of it may be copied."""
ELEMENTS = {"F4": "a 4-bit float format", "F6_E2M3": "a 6-bit float format", "F6_E3M2": "a 6-bit float format"}
"""Element types that only such formats have."""
METHODS = {
    "gptq": "GPTQ", "awq": "AWQ", "auto-round": "AutoRound", "exl2": "EXL2", "exl3": "EXL3", "hqq": "HQQ",
    "aqlm": "AQLM", "quark": "Quark", "mxfp4": "MXFP4", "bitnet": "BitNet", "eetq": "EETQ", "vptq": "VPTQ",
    "spqr": "SpQR", "higgs": "HIGGS", "modelopt": "ModelOpt",
}  # fmt: skip
"""How a `quant_method` is written, where that is not as the config has it."""
