"""The shard format, which training shares with the indexer: see `core.shards`."""

from core.shards import (
    ShardedVectors,
    ShardRecord,
    ids_path,
    vectors_path,
    whole_shards,
    write_shard,
)

__all__ = [
    "ShardRecord",
    "ShardedVectors",
    "ids_path",
    "vectors_path",
    "whole_shards",
    "write_shard",
]
