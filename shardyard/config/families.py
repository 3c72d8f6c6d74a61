"""Model families that something was measured for, by config.json's model_type."""

from __future__ import annotations

PACKED = frozenset(
    {
        "cohere2", "deepseek_v3", "gemma3_text", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "llama",
        "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
    }
)  # fmt: skip
"""Packed documents come out as each alone (difference below 1e-5), so they may share a forward."""

SPLIT = frozenset(
    {
        "cohere2", "deepseek_v3", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "llama", "mistral", "mixtral",
        "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
    }
)  # fmt: skip
"""Under tensor parallelism every parameter's gradient equals that of one process."""

UNSTAGED = frozenset({"gpt2", "gpt_neox"})
"""Of the packed ones, those that a pipeline cannot cut: their bodies are no embedding, layers and norm."""
