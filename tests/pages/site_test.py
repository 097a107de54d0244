#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The site that scripts/site.sh makes: every page is in its navigation, every link and picture leads somewhere, and no
page loads anything from elsewhere. Exit status 77 (skipped) where the generator cannot be installed."""

import html.parser
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
NO_INDEX = re.compile(r"Could not fetch|Temporary failure|No matching distribution|ConnectionError")
LOADED = {("img", "src"), ("img", "srcset"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"),
          ("source", "srcset"), ("object", "data"), ("video", "src"), ("audio", "src"), ("embed", "src"),
          ("form", "action")}


class Page(html.parser.HTMLParser):
    """A page's names, what it links to, what it loads, and the links of its navigation."""

    def __init__(self, text):
        super().__init__()
        self.names, self.links, self.loads, self.navigation = set(), [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.names.update(filter(None, [values.get("id"), values.get("name")]))
        self.loads += [values[name] for element, name in LOADED if element == tag and values.get(name)]
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
            if "md-nav__link" in values.get("class", ""):
                self.navigation.append(values["href"])


def is_elsewhere(target):
    return bool(re.match(r"(?!data:)[a-zA-Z][\w+.-]*:|//", target))


def problems_of(site):
    """What is wrong with the pages of a folder; CSS too may load."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    problems = []
    for path, page in pages.items():
        where = path.relative_to(site)
        problems += [f"{where} loads {target}" for target in page.loads if is_elsewhere(target)]
        for target in [*page.links, *page.loads]:
            name, _, anchor = urllib.parse.unquote(target).partition("#")
            if is_elsewhere(target) or target.startswith("data:"):
                continue
            found = (path.parent / name).resolve() if name else path
            if not found.is_file():
                problems.append(f"{where}: {target} leads nowhere")
            elif anchor and found in pages and anchor not in pages[found].names:
                problems.append(f"{where}: {target}: the page has no such heading")
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        for target in map("".join, re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text)):
            problems += [f"{path.name} loads {target}"] if is_elsewhere(target) else []
    return problems


def lost_pages(site):
    """Pages of docs that the home page's navigation does not name; the home page is README.md."""
    home = site / "index.html"
    named = {(site / link.partition("#")[0]).resolve() for link in Page(home.read_text(encoding="utf-8")).navigation}
    pages = [path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 15
    return [f"{page} is not in the navigation" for page in pages if (site / page).resolve() not in named]


def what_is_wrong_is_seen():
    right = '<a href="b.html#there">b</a><img src="p.svg">'
    wrong = {'<a href="c.html">': "nowhere", '<a href="b.html#gone">': "heading", '<img src="q.svg">': "nowhere",
             '<script src="https://example.org/s.js"></script>': "loads", '<link href="//example.org/f.css">': "loads"}
    with tempfile.TemporaryDirectory() as folder:
        site = pathlib.Path(folder).resolve()
        (site / "b.html").write_text('<h2 id="there">x</h2><a href="https://example.org/">', encoding="utf-8")
        (site / "p.svg").write_text("<svg/>", encoding="utf-8")
        for text, word in [(right, ""), *((right + bad, word) for bad, word in wrong.items())]:
            (site / "a.html").write_text(text, encoding="utf-8")
            found = problems_of(site)
            if len(found) != bool(word) or word and word not in found[0]:
                return [f"in {text}: {found}"]
    return []


def main():
    problems = what_is_wrong_is_seen()
    with tempfile.TemporaryDirectory() as folder:
        site = pathlib.Path(folder, "site").resolve()
        done = subprocess.run([ROOT / "scripts/site.sh", site], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        print(done.stdout, end="")
        if done.returncode == 3 and NO_INDEX.search(done.stdout):
            print("the tools of scripts/site_tools.txt cannot be installed here: no package index is reached")
            return 77
        if done.returncode:
            return 1
        problems += problems_of(site) + lost_pages(site)
        again = subprocess.run([ROOT / "scripts/site.sh", ROOT / "docs"], capture_output=True, check=False).returncode
        problems += [] if again == 2 else ["site.sh replaces a folder that has no site in it"]
    print("\n".join(problems) or "every link leads somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
