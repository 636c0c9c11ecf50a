from pytest import approx

from evaluation.beir import Qrels, Run
from evaluation.thresholds import MinScoreSuggestion, suggest_min_score


def judged(count: int) -> tuple[Qrels, Run]:
    """Queries with a relevant hit at 0.90, 0.89, … and another at 0.30 below it."""
    qrels = {f"q{i}": {"good": 1, "bad": 0} for i in range(count)}
    run = {f"q{i}": {"good": 0.9 - i / 100, "other": 0.6 - i / 100} for i in range(count)}
    return qrels, run


def test_the_threshold_keeps_95_percent_of_the_relevant_hits() -> None:
    # Relevant: 0.90 … 0.51; 38 of 40 are at least 0.53. Others: 0.60 … 0.21; 8 are at least 0.53.
    assert suggest_min_score(*judged(40)) == MinScoreSuggestion(
        min_score=0.53,
        relevant_kept=0.95,
        others_dropped=approx(32 / 40),
        empty_queries=2,
        queries=40,
    )


def test_the_threshold_is_rounded_down() -> None:
    qrels = {f"q{i}": {"d": 2} for i in range(20)}
    run = {query: {"d": 0.712379} for query in qrels}
    suggestion = suggest_min_score(qrels, run)
    assert suggestion
    assert (suggestion.min_score, suggestion.relevant_kept) == (0.7123, 1.0)
    assert (suggestion.others_dropped, suggestion.empty_queries) == (0.0, 0)


def test_hits_below_rank_10_do_not_count() -> None:
    qrels, run = judged(20)
    deep = {f"d{i}": 0.1 for i in range(9)} | {"late": 0.01}
    deep_run = {query: scores | deep for query, scores in run.items()}
    deep_qrels = {query: grades | {"late": 1} for query, grades in qrels.items()}
    found, expected = suggest_min_score(deep_qrels, deep_run), suggest_min_score(qrels, run)
    assert found and expected
    assert found.min_score == expected.min_score


def test_too_few_judged_queries_give_no_suggestion() -> None:
    qrels, run = judged(20)
    assert suggest_min_score(qrels, run)
    del run["q0"]  # a query without hits
    assert suggest_min_score(qrels, run) is None
    assert suggest_min_score(*judged(19)) is None
    assert suggest_min_score({q: {"good": 0} for q in qrels}, run) is None
