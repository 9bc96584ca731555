"""Prepares a corpus, and says what it holds:

python data/prepare.py data=stdlib
python data/prepare.py data=shakespeare_char data.path=<file>
python data/prepare.py data=text data.path=<file or folder> tokenizer=gpt2

train.py does the same where it is needed. The keys are those of train.py.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # instead of data/, so that `import data` is the package

from hydra import compose, initialize_config_dir  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from gpt.data import prepare  # noqa: E402
from gpt.errors import UserError  # noqa: E402
from gpt.schema import DataConfig, TokenizerConfig, build  # noqa: E402


def main(overrides: list[str]) -> int:
    if {"-h", "--help"} & set(overrides):
        print(__doc__.strip())
        return 0
    began = time.perf_counter()
    try:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            config = OmegaConf.to_container(compose("train", overrides=overrides), resolve=True)
        data, tokenizer = (
            build(DataConfig, config["data"], "data"),
            build(TokenizerConfig, config["tokenizer"], "tokenizer"),
        )
        corpus = prepare(data, tokenizer, ROOT / "data")
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted, nothing is left behind", file=sys.stderr)
        return 130
    print(corpus.summary())
    print(f"  checked    all files, in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
