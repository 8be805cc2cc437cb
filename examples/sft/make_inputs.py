"""Make the inputs of the example: a small untrained chat model, conversations, and tasks.

    python make_inputs.py      # writes model/, chats.jsonl and tasks.jsonl beside this file

Replace them with a downloaded model and your files. The task is to sort letters: the answer to "dbca" is "abcd". The
conversations are about words of 3 and 4 letters; the tasks have up to 6, which must be learned from rewards.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LETTERS = "abcdefgh"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    here = Path(__file__).parent
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(here / "model")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=end,
        )
    )
    model.save_pretrained(here / "model")
    GenerationConfig(eos_token_id=end).save_pretrained(here / "model")
    rng = random.Random(0)
    chats = [_chat(*_task(rng, 3, 4)) for _ in range(2000)]
    tasks = [dict(zip(("question", "answer"), _task(rng, 3, 6), strict=True)) for _ in range(3000)]
    for name, lines in (("chats.jsonl", chats), ("tasks.jsonl", tasks)):
        (here / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, in the format of ChatML."""
    characters = sorted({*LETTERS, *"systemuerain: \n"})
    core = Tokenizer(models.WordLevel({text: number for number, text in enumerate([*characters, "?"])}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = Fuse()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _task(rng: random.Random, shortest: int, longest: int) -> tuple[str, str]:
    letters = rng.sample(LETTERS, rng.randint(shortest, longest))
    return f"sort: {''.join(letters)}", "".join(sorted(letters))


def _chat(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    main()
