"""Scores by word overlap and the offline judge, against brute force."""

import itertools

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from difftx.config.recipes import load_config
from difftx.evals.hallucination import overlap
from difftx.evals.hallucination.judges import Case, OfflineJudge
from difftx.progress import Work

texts = st.lists(st.sampled_from(["red", "Blue", "the", "x", "1,200", "yes"]), max_size=7).map(" ".join)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Cat's  (black) hat.", ["cat", "s", "black", "hat"]),
        ("1,234,567 and 1,23", ["1234567", "and", "1", "23"]),
        ("ＡＢＣ ﬁne Straße", ["abc", "fine", "strasse"]),
        ("The A", ["the", "a"]),
        ("?!", []),
    ],
)
def test_words_are_lower_case_without_punctuation(text, words):
    assert overlap.words(text) == words


@pytest.mark.parametrize(
    ("answer", "reference", "found"),
    [
        ("Bath, Maine", "bath maine", True),
        ("It is in the Bath, Maine area", "Bath, Maine", True),
        ("Bath in Maine", "Bath, Maine", False),
        ("Bathsheba", "Bath", False),
        ('Jonny Craig', 'Jonny" Craig', True),
        ("He had 3,500 seats.", "3500", True),
        ("no, it was not", "no", True),
        ("there is no answer", "No", False),
        ("Yes.", "yes", True),
        ("", "x", False),
        ("anything", "?", False),
        ("The A", "the a", True),
    ],
)  # fmt: skip
def test_answer_contains_a_reference_in_whole_words(answer, reference, found):
    assert overlap.contains(answer, reference) is found


def test_abstentions_are_recognised():
    abstentions = ["I don't know.", "I don’t know", "unanswerable", "It is not mentioned in the document", "Unknown"]
    abstentions += ["N/A", "The document does not say", "It cannot be determined.", "There is not enough information"]
    others = ["", "Paris", "The Unknown Soldier", "no", "None of the Above is a film", "not known for " + "x " * 20]
    assert [text for text in abstentions + others if overlap.is_abstention(text)] == abstentions


def common_subsequence(first, second):
    return max(
        len(chosen)
        for count in range(len(first) + 1)
        for chosen in itertools.combinations(first, count)
        if any(chosen == other for other in itertools.combinations(second, count))
    )


@given(texts, texts)
def test_scores_by_brute_force(answer, reference):
    has, wanted = overlap.words(answer), overlap.words(reference)
    left, common = list(wanted), 0
    for word in has:
        if word in left:
            left.remove(word)
            common += 1
    assert overlap.recall(answer, reference) == (common / len(wanted) if wanted else 0)
    both = len(has) + len(wanted)
    assert overlap.f1(answer, reference) == (2 * common / both if both else 0)
    assert overlap.rouge_l(answer, reference) == (2 * common_subsequence(has, wanted) / both if both else 0)


@given(texts, st.lists(texts, max_size=3), st.integers(1, 3))
def test_support_equals_brute_force(answer, sources, length):
    has = overlap.words(answer)
    length = min(length, len(has))
    if not has:
        assert overlap.support(answer, sources, 2) == 0
        return
    runs = [has[i : i + length] for i in range(len(has) - length + 1)]
    there = [w[i : i + length] for s in sources for w in [overlap.words(s)] for i in range(len(w))]
    assert overlap.support(answer, sources, length) == sum(run in there for run in runs) / len(runs)


def test_verdicts_and_name_of_the_offline_judge():
    config = load_config(f"{ROOT}/configs/quickstart.py:diff", {"eval.hallucination.support_threshold": "0.6"})
    judge = OfflineJudge(config.eval.hallucination)
    document, reference = "The mayor of Bath resigned on Monday after a vote.", "Bath's mayor has gone."
    summaries = {
        "The mayor of Bath resigned on Monday.": True,
        "Bath's mayor has gone after a vote.": True,  # 5 of 6 runs of two words are in the document or the reference.
        "The mayor of Rome resigned on Monday.": True,  # Exactly 3 of 5 runs. The judge misses the wrong name.
        "The mayor of Rome was shot on Monday.": False,
        "Cats are animals.": False,
    }
    answers = {"Bath": True, "in Bath, England": True, "Rome": False, "I don't know": False}
    cases = [Case("summarisation", document, None, (reference,), text) for text in summaries]
    cases += [Case("question_answering", document, "Where?", ("London", "Bath"), text) for text in answers]
    verdicts = judge.verdicts(cases, "these", Work(enabled=False))
    assert [verdict.accurate for verdict in verdicts] == [*summaries.values(), *answers.values()]
    assert all(verdict.why.startswith("offline judge: ") for verdict in verdicts)
    assert verdicts[2].why == "offline judge: 0.600 supported"
    assert judge.name == "offline judge: words in common"
    assert judge.label == "offline_judge"
    assert judge.details() == {"support_words": 2, "support_threshold": 0.6}
