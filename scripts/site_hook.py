# SPDX-License-Identifier: Apache-2.0
"""Which files the site of scripts/site.yml has: the project's pages, in the repository's own folders, so that their
links are right here and on a code host, and a page for each source, table and folder that they link to."""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]  # besides docs/
ASSETS = ["scripts/site.css", "scripts/site-iframe-worker.js"]
LANGUAGES = {".h": "c", ".c": "c", ".py": "python", ".sh": "sh", ".sbatch": "sh", ".yml": "yaml", ".json": "json"}
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#:]+)(?=[)#])")
generated = set()  # paths that have a generated page


def linked(page, text):
    """Paths of the repository, from its root, that a page links to."""
    return {posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            for _, target in LINK.findall(FENCE.sub("", text))}


def navigation():
    """The pages in the order of docs/index.md, in a section for each folder."""
    sections = {}
    for _, target in LINK.findall((ROOT / "docs/index.md").read_text(encoding="utf-8").partition("\n| ")[2]):
        path = posixpath.normpath("docs/" + target)
        title = path.split("/")[1].capitalize() if path.startswith("docs/") else "Project"
        if path not in sections.setdefault(title, []):
            sections[title].append(path)
    return [{"Home": "README.md"}, {"All pages": "docs/index.md"},
            *({title: paths} for title, paths in sections.items())]


def cell(text):
    parts = re.split("(`[^`]*`)", text)
    return "".join(part.replace("|", r"\|") if i % 2 else
                   re.sub(r"([\\*_\[\]|])", r"\\\1", part).replace("<", "&lt;") for i, part in enumerate(parts))


def table(lines):
    rows = [[cell(text) for text in line.split("\t")] for line in lines]
    width = max(map(len, rows))
    rows = [row + [""] * (width - len(row)) for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * width, *rows[1:]])


def tables(text):
    """A file of tab-separated tables as Markdown: its comments are paragraphs."""
    parts, rows, comment = [], [], []
    for line in [*text.splitlines(), ""]:
        if rows and (not line.strip() or line.startswith("#")):
            parts.append(table(rows))
            rows = []
        if line.startswith("#") and line.strip("# "):
            comment.append(line.lstrip("# "))
        elif comment:
            parts.append(" ".join(comment))
            comment = []
        if line.strip() and not line.startswith("#"):
            rows.append(line)
    return "\n\n".join(parts)


def source_pages(path):
    """(path, Markdown) of a file or folder of the repository, and of what the folder has."""
    place, name = ROOT / path, posixpath.basename(path)
    front = f"---\ntitle: {name}\nhide: [toc]\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n`{path}`\n\n"
    if place.is_dir():
        entries = sorted(entry.name for entry in place.iterdir()
                         if not entry.name.startswith((".", "__")) and entry.name != "out")  # as .gitignore
        yield path, front + "\n".join(f"- [{entry}]({name}/{entry}.md)" for entry in entries) + "\n"
        for entry in entries:
            yield from source_pages(f"{path}/{entry}")
        return
    text = place.read_text(encoding="utf-8")
    code = f"~~~~~~ {LANGUAGES.get(place.suffix, 'text')}\n{text}\n~~~~~~\n"
    yield path, front + (tables(text) if place.suffix == ".tsv" else code)


def on_config(config):
    config.nav = navigation()
    config.theme.static_templates = set()  # neither 404.html nor sitemap.xml: they need an address
    return config


def on_files(files, config):
    def of_repository(path):
        return File(path, str(ROOT), config.site_dir, use_directory_urls=False)

    pages = [*PAGES, *("docs/" + file.src_uri for file in files if file.src_uri.endswith(".md"))]
    targets = set().union(*(linked(page, (ROOT / page).read_text(encoding="utf-8")) for page in pages))
    pictures = {path for path in targets if path.startswith("docs/pictures/")}
    site_files = [file for file in files if file.src_dir != config.docs_dir]  # the theme's
    site_files += [of_repository(path) for path in [*pages, *sorted(pictures), *ASSETS]]
    for target in sorted(targets - pictures - set(pages)):
        for path, text in source_pages(target) if (ROOT / target).exists() else ():
            if path not in generated:
                generated.add(path)
                site_files.append(File.generated(config, path + ".md", content=text,
                                                 inclusion=InclusionLevel.NOT_IN_NAV))
    return Files(site_files)


def on_page_markdown(markdown, page, **_):
    """Links to sources lead to their pages."""
    folder = posixpath.dirname(page.file.src_uri)

    def mended(match):
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        return match[1] + match[2] + (".md" if path in generated else "")

    pieces = re.split(r"(^(?:```|~~~).*?^(?:```|~~~)\s*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(piece if i % 2 else LINK.sub(mended, piece) for i, piece in enumerate(pieces))


def on_page_content(html, **_):
    """Classes for site.css: short code, which does not break at its hyphens, and cells of sentences. A picture links to
    itself: a phone shows it too small."""
    def cell_of(match):
        return f'<td class="text">{match[1]}</td>' if len(re.sub("<[^>]*>", "", match[1])) > 40 else match[0]

    html = re.sub(r'(<a [^>]*>)?(<img [^>]*src="([^"]+)"[^>]*>)',
                  lambda match: match[0] if match[1] else f'<a href="{match[3]}">{match[2]}</a>', html)
    html = re.sub(r"<code>([^<\n]{1,28})</code>", r'<code class="short">\1</code>', html)
    return re.sub(r"<td>(.*?)</td>", cell_of, html)
