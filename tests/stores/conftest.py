from tests.indexer.conftest import indexes, options, published

__all__ = ["indexes", "options", "published"]
