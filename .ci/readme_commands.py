"""Prints the commands of a Markdown file's ```bash blocks, one a line (continued lines joined, comments dropped)."""

import re
import sys
from pathlib import Path

text = Path(sys.argv[1]).read_text()
for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
    for line in block.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            print(line.strip())
