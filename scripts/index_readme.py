"""README.md as a package index shows it. The build hook loads this file; standard library only.

A relative link leads nowhere on an index. Where the project names its repository it becomes an
address there, elsewhere its words alone; pictures then go. Code blocks stay as they are.
"""

import re

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:|#)([^)\s]+)\)")
_PICTURE = re.compile(r'<img\b[^>]*\bsrc="(?!https?://)([^"]+)"[^>]*>')
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def for_index(text: str, repository: str | None) -> str:
    """`text` with its relative links led to `repository`, its address; None: taken out."""
    base = repository.rstrip("/") if repository else None

    def link(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        if base is None:
            return "" if mark else words
        return f"{mark}[{words}]({base}/{'raw' if mark else 'blob'}/HEAD/{target})"

    def picture(found: re.Match[str]) -> str:
        if base is None:
            return ""
        return found.group().replace(found.group(1), f"{base}/raw/HEAD/{found.group(1)}")

    parts = _FENCE.split(text)
    parts[::2] = [_PICTURE.sub(picture, _LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)
