from curation.common import sample_queries


def test_a_sample_of_queries_keeps_their_order() -> None:
    queries = {f"q{i}": str(i) for i in range(20)}
    first, other = (list(sample_queries(queries, 5, seed)) for seed in (0, 1))
    assert len(first) == 5 and first == sorted(first, key=list(queries).index)
    assert first != other
    assert sample_queries(queries, None, 0) == queries
