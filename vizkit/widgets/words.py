"""Words under a picture, as a widget shows them."""

from __future__ import annotations

import html


def preformatted(words: str) -> str:
    """Line for line, wrapped where the page is narrow, and said by screen readers when it changes.

    >>> preformatted("a < b")
    '<pre style="white-space: pre-wrap; word-break: normal" role="status">a &lt; b</pre>'
    """
    return f'<pre style="white-space: pre-wrap; word-break: normal" role="status">{html.escape(words)}</pre>'
