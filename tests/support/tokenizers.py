"""Tiny byte-level tokenizers and chat templates of several shapes, all written here."""

from __future__ import annotations

from typing import Any

QWEN3_LIKE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{% endif %}
    {{- 'Tools:' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set parts = m.content.split('</think>') %}
        {%- set said = parts[-1].lstrip('\n') if parts | length > 1 else m.content %}
        {%- set inline = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else inline %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- said }}
        {%- for call in m.tool_calls or [] %}
            {%- if said or not loop.first %}{{- '\n' }}{% endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
"""Rewrites earlier turns: thoughts stay only after the last question, the last reply always gets one."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Knows neither tools nor thoughts."""

CHATML_WITHOUT_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
"""Has no generation prompt."""

INSTRUCTION = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% else %}"
    "{{ raise_exception('No ' + m.role + ' here') }}"
    "{% endif %}{% endfor %}"
)
"""The prompt needs no header; trims; refuses system messages."""

ENDS_THE_LAST = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}<|eot|>{% endif %}"
)
"""Writes one more token after the last reply than after others."""

OPENS_A_THOUGHT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""Its generation prompt opens a thought that its replies lack."""

ALWAYS_ASKS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
"""Ends everything with the header of a reply, asked or not."""

NO_TERMINATOR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

CALLS_AS_TEXT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + ':' + call.function.arguments }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Joins the arguments as text, which fails with a mapping."""

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "[INST]", "[/INST]",
    "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<|eot|>",
)  # fmt: skip
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def byte_tokenizer(
    chat_template: str | None = None,
    *,
    special: tuple[str, ...] = SPECIAL,
    eos: str | None = "<|endoftext|>",
    pad: str | None = None,
) -> Any:
    """One id per byte, but ``\\n\\n``, ``in`` and `` t`` are one token; special tokens have the first ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("i", "n"), ("Ġ", "t")]
    words = [*special, *letters, *("".join(merge) for merge in merges)]
    model = models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad)
    fast.chat_template = chat_template
    return fast


def trained_text(tokenizer: Any, samples: Any) -> list[list[str]]:
    """For each sample the decoded stretches of targets; positions without a target part them."""
    decoded: list[list[str]] = []
    for sample in samples:
        stretches: list[list[int]] = []
        inside = False
        for label in sample.labels.tolist():
            if label != -100 and not inside:
                stretches.append([])
            inside = label != -100
            if inside:
                stretches[-1].append(label)
        decoded.append([tokenizer.decode(ids) for ids in stretches])
    return decoded


def sentencepiece_tokenizer(chat_template: str | None = None) -> Any:
    """Llama's form: ``▁`` for spaces, one put before a text, and a token for each byte of what is unknown."""
    from tokenizers import decoders, normalizers

    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _of_pieces(spaces, None, decoders.Sequence(steps), chat_template)


def metaspace_tokenizer(chat_template: str | None = None) -> Any:
    """The older form of the same, by one step."""
    from tokenizers import decoders, pre_tokenizers

    return _of_pieces(None, pre_tokenizers.Metaspace(), decoders.Metaspace(), chat_template)


def _of_pieces(normalizer: Any, pre_tokenizer: Any, decoder: Any, chat_template: str | None) -> Any:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    letters = [chr(code) for code in range(0x20, 0x7F)] + ["\n", "▁"]
    merges = [("▁", "▁"), ("▁", "a"), ("▁", "b"), ("a", "b")]
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *map("".join, merges)]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = chat_template
    return fast
