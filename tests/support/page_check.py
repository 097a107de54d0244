# SPDX-License-Identifier: Apache-2.0
"""What every HTML page of anyrank must be: one file that reaches for nothing outside, with its data where no text of
others can leave it."""

import json
import re

OUTSIDE = (r"https?:", r"\bsrc\s*=", r"\bhref\s*=", r"url\(", r"@import", r"\bimport\b", r"\bfetch\b", r"XMLHttpRequest",
           r"WebSocket", r"sendBeacon", r"innerHTML", r"\beval\b", r"document\.write")


def scripts_of(page):
    return re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)


def data_of(page):
    """The data of a page without problems."""
    return json.loads(scripts_of(page)[0])


def problems_of(page):
    """[problem]"""
    problems = [f"the page has {found.group(0)!r}" for found in (re.search(p, page) for p in OUTSIDE) if found]
    if "default-src 'none'" not in page:
        problems.append("the page does not forbid the network")
    if re.search(r"@\w+\.(css|js)@|@DATA@", page):
        problems.append("the page lacks a part")
    scripts = scripts_of(page)
    if len(scripts) != 2 or page.count("<script") != 2 or page.count("</script") != 2:
        problems.append(f"the page has {len(scripts)} scripts")
    elif "<" in scripts[0]:
        problems.append("the data of the page has a '<'")
    return problems
