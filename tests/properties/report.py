"""What the laws found, as a table and as docs/exactness.md. The same results give the same text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.properties.agreement import CUT, Agreement
from tests.properties.sampled import Sampled
from tests.properties.trials import FAITHFUL_SHARE, FAITHFUL_TURNS, LONGEST_PLAN, POLICIES, Result
from tests.properties.violations import LAWS
from turnloom.render.quirks import Quirk
from turnloom.testing.tokenizers import TEMPLATES
from turnloom.testing.vocabularies import LLAMA_CPP

_COLUMNS = (
    "template",
    "ids",
    "sessions",
    "turns",
    "bridged",
    "violations by law 1 2 3 4 5 9 f",
    "forks by reason",
    "refused",
    "agreement",
    "drift, cut",
    "drift",
)


def table(found: Sequence[Result]) -> list[str]:
    """Lines of a Markdown table, one template each."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    return lines + [f"| {' | '.join(_row(r))} |" for r in found if not r.unusable]


def _row(r: Result) -> list[str]:
    forks = ", ".join(f"{kind} {n}" for kind, n in sorted(r.forks.items()))
    broken = " ".join(str(r.broken[law]) for law in LAWS)
    own = "own" if r.exact else "stand-in"
    both = Agreement()
    both.add(r.cut)
    both.add(r.whole)
    figures = [str(r.sessions), str(r.turns), str(r.bridged), broken, forks, str(sum(r.refused.values())) if r.refused else "0"]
    return [r.name, own, *figures, _agreement(both), _drift(r.cut), _drift(r.whole)]


def _agreement(found: Agreement) -> str:
    """Of the bridged prompts that can be compared, those whose text is the template's."""
    counts = [f"{found.same_text}/{found.compared}"] if found.compared else []
    counts += [f"{n} {why}" for n, why in ((found.rewritten, "rewritten"), (found.unread, "unread")) if n]
    return ", ".join(counts)


def _drift(found: Agreement) -> str:
    """The share of prompts with the template's text and other ids than its encoding."""
    return f"{1 - found.same_ids / found.same_text:.1%}" if found.same_text else "–"


def document(found: Sequence[Result], sessions: int, sampled: Sampled) -> str:
    usable = [r for r in found if not r.unusable]
    return "\n".join(
        [
            *_introduction(usable, sessions, sampled),
            *table(found),
            "",
            *_cannot(found),
            *_refusals(usable),
            *_rewrites(usable),
            *_misreads(usable),
            *_quirks(usable),
            *_vocabularies(usable),
        ]
    )


def _introduction(found: Sequence[Result], sessions: int, sampled: Sampled) -> list[str]:
    turns, bridged, checked = (sum(n) for n in zip(*((r.turns, r.bridged, r.checked[9]) for r in found), strict=True))
    broken = sum(sum(r.broken.values()) for r in found)
    cut, whole = Agreement(), Agreement()
    for r in found:
        cut.add(r.cut)
        whole.add(r.whole)
    own = sum(r.exact for r in found)
    compared = cut.compared + whole.compared
    policies = ", ".join(
        f"{weight}% `{h.policy}`{f' with realign {h.realign}' if h.realign else ''}{' and strict matching' if not m.minted_ids else ''}"
        for h, m, weight in POLICIES
    )
    return [
        "# Exactness, measured",
        "",
        "Written by `make laws`; edit nothing here. The templates are the original ones of"
        f" {TEMPLATES.requirement.replace('==', ' ')} and {LLAMA_CPP.requirement.replace('==', ' ')} (llama.cpp's), {len(found)} in all,"
        f" {own} of them with the model's own tokenizer and the others with a stand-in (named at the end).",
        "",
        f"Each template had {sessions} random sessions of 1 to {LONGEST_PLAN} steps: {turns} turns, {bridged} of them bridged."
        f" **{broken} violations.** The engine is scripted: it writes replies as the template spells them, with reasoning and calls,"
        " and broken ones, cut into pieces that the tokenizer would not choose, and ends them in every way an engine can. The client"
        " retries, branches, edits, compacts, leaves, changes its tools, interleaves sub-agents and echoes replies in eight styles."
        f" History policies: {policies}.",
        "",
        "Columns:",
        "",
        "- **ids**: whose token ids they are, the model's own or a stand-in's.",
        "- **violations** of law 1 (prefix), 2 (truth), 3 (once), 4 (only sampled), 5 (idempotence), 9 (no text becomes a control token;"
        f" {checked} renderings were compared with the same ones with a harmless word for each spelling), and f: a turn that starts anew or"
        " leaves recorded tokens without its true reason, `template` where the profile says that the shape bridges, or a refusal that the"
        " profile does not know.",
        "- **forks by reason**: the [glossary](glossary.md) says what each means. They come from what the client does (and from the history"
        " policy), not from the template, but for `template`.",
        "- **refused**: requests answered with status 400 because the template takes no such history; listed below.",
        "- **agreement**: with a faithful client, bridged prompts whose text is the template's own full rendering, of those that can be"
        " compared. *rewritten*: prompts of conversations in which the template wrote earlier text anew, so there is nothing to compare"
        " (a bridge keeps what was sampled); *unread*: after a reply that the client got as something else than was meant.",
        "- **drift**: of the prompts that agree in text, the share whose ids are *not* those of encoding the text anew: what would be"
        f" trained on or sampled from wrongly without a bridge. *cut*: replies cut at one in {CUT} characters on average, each piece in the"
        " tokenizer's own segmentation; the last column: each reply encoded as one string, so that only the seams differ."
        f" {-(-sessions // FAITHFUL_SHARE)} conversations of {FAITHFUL_TURNS[0]} to {FAITHFUL_TURNS[1]} turns each.",
        "",
        f"Over all templates: {cut.same_text + whole.same_text} of {compared} comparable"
        f" prompts agree in text; {_drift(cut)} of them drift with cut replies, {_drift(whole)} with uncut ones.",
        "",
        str(sampled),
        "",
    ]


def _cannot(found: Sequence[Result]) -> list[str]:
    lines = ["## Templates that cannot bridge some shape", ""]
    lines += [f"- `{r.name}` is not tried: it renders no request without tools ({r.unusable})." for r in found if r.unusable]
    for r in found:
        answers: dict[str, list[str]] = {}
        for shape, answer in (r.profile.bridges if r.profile else {}).items():
            if answer != "yes":
                answers.setdefault(answer, []).append(shape)
        lines += [f"- `{r.name}` after {', '.join(shapes)}: {answer}." for answer, shapes in answers.items()]
        whole = {shape: answer for shape, answer in (r.profile.whole if r.profile else {}).items() if answer != "yes"}
        lines += [f"- `{r.name}` refuses {shape} even rendered whole: {answer}." for shape, answer in whole.items()]
    return [*lines, *([] if len(lines) > 2 else ["None."]), ""]


def _refusals(found: Sequence[Result]) -> list[str]:
    lines = [
        "## Refused requests",
        "",
        "Histories that no template must take: a result of no call, results out of their order. Nothing is sampled for them.",
        "",
    ]
    for r in found:
        words: Counter[str] = Counter()
        for (_, said), n in r.refused.items():
            words[_without_numbers(said)] += n
        lines += [f"- `{r.name}`: {n} times: {said}." for said, n in sorted(words.items())]
    return [*lines, ""]


def _without_numbers(said: str) -> str:
    return " ".join("N" if word.isdigit() else "'…'" if word.startswith("'toolu_") else word for word in said.split())


def _rewrites(found: Sequence[Result]) -> list[str]:
    lines = ["## Where a template writes earlier text anew", "", "The first place that was met with a faithful client.", ""]
    for r in found:
        example = r.cut.rewrites or r.whole.rewrites
        if example:
            lines.append(f"- `{r.name}` ({_why(r)}): {_code(example)}")
    return [*lines, ""]


def _misreads(found: Sequence[Result]) -> list[str]:
    lines = [
        "## Replies that are not read as they were meant",
        "",
        "The template spells calls or framing in a format that no parser of ours reads, or spells them ambiguously: the client gets them as"
        " text. Tokens are exact all the same; only the conversations are not compared for agreement. The first reply that was met.",
        "",
    ]
    for r in found:
        if example := r.cut.misreads or r.whole.misreads:
            lines.append(f"- `{r.name}`: {_code(example)}")
    return [*lines, ""]


def _why(r: Result) -> str:
    assert r.profile is not None
    if not r.profile.appends:
        return "what it writes before a reply does not stay"
    if r.profile.reasoning != "kept":
        return f"earlier reasoning is {r.profile.reasoning}"
    return "a reply is spelled differently once more follows"


def _code(text: str) -> str:
    return f"`` {text} ``"


def _quirks(found: Sequence[Result]) -> list[str]:
    lines = ["## Quirks", "", "What a template has no place for, found by asking it; [what each means](cli.md#quirks-of-a-template).", ""]
    for quirk in Quirk:
        having = [f"`{r.name}`" for r in found if r.profile and quirk in r.profile.quirks]
        lines += [f"- **{quirk}**: {', '.join(having)}"] if having else []
    return [*lines, ""]


def _vocabularies(found: Sequence[Result]) -> list[str]:
    lines = ["## Stand-in tokenizers", "", "A stand-in has every control token of the model as one token, under another id.", ""]
    return [*lines, *(f"- `{r.name}`: {r.vocabulary}" for r in found if not r.exact), ""]
