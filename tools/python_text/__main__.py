"""Write the prompts and the text that ship with the package: `python -m tools.python_text`.

They are cut from the standard library of the interpreter that runs this.
"""

import json
import random
import sysconfig
from pathlib import Path

from foretoken.text.packaged import PATH
from tools.python_text.heldout import edit_prompts, excerpt, heldout_prompts
from tools.python_text.stdlib import load_corpus

CODE, EDITS, TEXTS = 200, 48, 128
CHARACTERS = 1900
"""Of a text: about 512 tokens."""


def main() -> None:
    """Write the file and its licence."""
    rows = [("code", one.name, one.text) for one in heldout_prompts(CODE)]
    rows += [("edit", one.name, one.text) for one in edit_prompts(EDITS)]
    rng = random.Random(0)
    long = [file for file in load_corpus().training
            if not file.is_test and len(file.text) > 2 * CHARACTERS]  # fmt: skip
    for file in sorted(rng.sample(long, TEXTS), key=lambda file: file.path):
        rows.append(("text", file.path, excerpt(file.text, CHARACTERS, rng)))
    lines = [json.dumps({"kind": kind, "name": name, "text": text}, ensure_ascii=False)
             for kind, name, text in rows]  # fmt: skip
    PATH.write_text("\n".join(lines) + "\n", "utf-8")
    licence = Path(sysconfig.get_paths()["stdlib"], "LICENSE.txt").read_text("utf-8")
    PATH.with_suffix(".LICENSE").write_text(licence, "utf-8")


if __name__ == "__main__":
    main()
