"""Assemble a page: a headline, a few facts, cards, options and versions."""

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import zip_longest
from typing import Any, Literal

import torch

from undrift.judge.page.markup import flat, folded, table, text
from undrift.system.atomic import write_text
from undrift.system.version import own_version

Tone = Literal["good", "bad", "warn", "plain"]


@dataclass(frozen=True)
class Headline:
    """What a page says first.

    Attributes:
        tone: whether that is good news.
        pill: the judgement in a word or two.
        sentence: what happened, for somebody who has never seen such a page.
        before, after: one number, of the source network and of the adapted one; empty where it is not known.
        what: what the number is.
        lead: a sentence or two below it.
    """

    tone: Tone
    pill: str
    sentence: str
    before: str = ""
    after: str = ""
    what: str = ""
    lead: str = ""


@dataclass(frozen=True)
class Card:
    """One finding: its title says it, `body` is HTML that shows it, and `note` says how to read that."""

    title: str
    body: str
    note: str = ""
    wide: bool = False


def render(
    kind: str,
    headline: Headline,
    facts: Sequence[tuple[str, str]],
    cards: Sequence[Card | None],
    details: Sequence[tuple[str, str]] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return a whole page.

    Args:
        kind: what was run, such as "adaptation".
        facts: names and values in a row below the headline.
        cards: in their order; those that are None have nothing to show.
        details: more text, each folded below its title.
        options: every option of the run.
    """
    written = time.strftime("%-d %B %Y, %H:%M %Z") if os.name == "posix" else time.strftime("%d %B %Y, %H:%M")
    shown = [card for card in cards if card is not None]
    style = files("undrift.judge.page").joinpath("page.css").read_text(encoding="utf-8")
    # Nothing may be loaded or run, even if a name were to slip through as markup.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    body = "".join(_card(card, second) for card, second in _in_rows(shown))
    below = [folded(title, f"<pre>{text(more)}</pre>") for title, more in details if more]
    below += [folded("Every option", table(flat(options or {}))), folded("Versions", table(versions()))]
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name=viewport content="width=device-width,initial-scale=1"><meta name=color-scheme content="light dark">'
        f'<link rel=icon href="data:,"><title>{text(headline.sentence)} – undrift</title>'
        f"<style>{style}</style></head><body><main>"
        f"<p class=top><span><b>undrift</b> · {text(kind)}</span><span>{text(written)}</span></p>"
        f"<section class='card hero'>{_headline(headline)}{_facts(facts)}</section>"
        f"<div class=cards>{body}<section class='card wide'><h2>How this was made</h2>{''.join(below)}</section></div>"
        "</main></body></html>\n"
    )


def write(path: str | os.PathLike[str], page: str) -> int:
    """Write a page, whole or not at all, and return its size in bytes."""
    return write_text(path, page)


def versions() -> list[tuple[str, str]]:
    """Return what ran, by name."""
    found = [("undrift", own_version()), ("PyTorch", torch.__version__), ("Python", platform.python_version())]
    found.append(("system", f"{platform.system()} {platform.machine()}"))
    if torch.cuda.is_available():
        found.append(("GPU", torch.cuda.get_device_name()))
    return found


def _headline(headline: Headline) -> str:
    numbers = ""
    if headline.after and headline.before:
        numbers = (
            f"<div class=was><b>{text(headline.before)}</b><span>source network</span></div><div class=to>→</div>"
            f"<div class=now><b>{text(headline.after)}</b><span>adapted</span></div>"
        )
    elif headline.after:
        numbers = f"<div class=now><b>{text(headline.after)}</b></div>"
    big = f"<div class=big>{numbers}</div><p class=note>{text(headline.what)}</p>" if numbers else ""
    lead = f"<p class=lead>{text(headline.lead)}</p>" if headline.lead else ""
    return (
        f"<span class='pill {headline.tone}'>{text(headline.pill)}</span><h1>{_line(headline.sentence)}</h1>{lead}{big}"
    )


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    inner = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts if value)
    return f"<dl class=facts>{inner}</dl>" if inner else ""


def _in_rows(cards: Sequence[Card]) -> list[tuple[Card, bool]]:
    """Return the cards in rows of two without a gap, as a lone narrow card becomes wide; and which are second."""
    out: list[tuple[Card, bool]] = []
    second = False
    for card, following in zip_longest(cards, cards[1:]):
        alone = not card.wide and not second and (following is None or following.wide)
        out.append((replace(card, wide=card.wide or alone), second and not card.wide))
        second = not card.wide and not alone and not second
    return out


def _line(title: str) -> str:
    """Return a title that is not broken before its per cent sign."""
    return text(title).replace(" %", "\N{NO-BREAK SPACE}%")


def _card(card: Card, second: bool) -> str:
    note = f"<p class=note>{text(card.note)}</p>" if card.note else ""
    kind = "card" + " wide" * card.wide + " second" * second
    return f"<section class='{kind}'><h2>{_line(card.title)}</h2>{note}{card.body}</section>"
