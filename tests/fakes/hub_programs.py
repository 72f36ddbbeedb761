"""Programs that stand in for those of a document's commands that reach the network: `hf` and `lm_eval`."""

import sys
from pathlib import Path

HF = """#!{python}
import json, pathlib, shutil, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--local-dir") + 1])
if "dataset" in sys.argv:  # as openai/gsm8k has it
    import pyarrow, pyarrow.parquet
    (folder / "main").mkdir(parents=True)
    for split, first in (("train", 0), ("test", 500)):
        rows = [{{"question": f"{{n}} + 1 =", "answer": f"that is {{n + 1}}\\n#### {{n + 1:,}}"}} for n in range(first, first + 40)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "main" / f"{{split}}-00000-of-00001.parquet")
else:
    shutil.copytree("runs/quickstart_hf", folder)
    (folder / "chat_template.jinja").write_text("{{% for m in messages %}}{{{{ m['content'] }}}} {{% endfor %}}")
"""

LM_EVAL = """#!{python}
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--model_args") + 1].partition("=")[2])
missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja") if not (folder / name).exists()]
sys.exit(f"{{folder}} has no {{missing}}" if missing else 0)
"""


def install(folder: Path) -> None:
    """Puts them into a folder for PATH."""
    folder.mkdir()
    for name, text in (("hf", HF), ("lm_eval", LM_EVAL)):
        (folder / name).write_text(text.format(python=sys.executable))
        (folder / name).chmod(0o755)
