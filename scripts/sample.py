"""Text from a trained run.

python scripts/sample.py checkpoint=runs/ablation/rope-s0 prompt="def "

tokens=300  temperature=0.8 (0: the likeliest)  top_k=null  seed=0  device=auto
context=null   tokens the model sees at most; null: its training length. When full, the last half of them stays
"""

import codecs
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpt.terminal import guard  # noqa: E402


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0 if arguments else 2
    sample(arguments)
    return 0


def sample(arguments: list[str]) -> None:
    from gpt.checkpoint import resolve
    from gpt.generate import beginning, generate
    from gpt.restore import named, restore, tokenizer_of
    from gpt.runtime import pick_device
    from gpt.schema import SampleConfig, parse

    config = parse(SampleConfig, arguments)
    checkpoint = resolve(named(config.checkpoint), log=lambda line: print(line, file=sys.stderr))
    model, run = restore(checkpoint, pick_device(config.device))
    tokenizer = tokenizer_of(checkpoint)
    prompt = tokenizer.encode(config.prompt).tolist() or beginning(tokenizer)
    context = config.context or run.model.block_size
    model.check_length(context)
    dropped = max(0, len(prompt) - context)
    if dropped:
        print(f"the prompt's first {dropped} tokens are dropped: context={context}", file=sys.stderr)

    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in several tokens
    print(config.prompt, end="", flush=True)
    try:
        for token in generate(model, prompt, config.tokens, context, config.temperature, config.top_k, config.seed):
            print(decoder.decode(tokenizer.decode_bytes([token])), end="", flush=True)
    except KeyboardInterrupt:  # the shell's prompt begins its own line
        print()
        raise
    print(decoder.decode(b"", final=True))


if __name__ == "__main__":
    guard(lambda: sys.exit(main(sys.argv[1:])))
