from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from core.cpus import available_cpus
from models.pairs import DEFAULT_PAIR


class Settings(BaseSettings):
    """What the service reads from its environment, once, at start."""

    model_config = SettingsConfigDict(env_prefix="CARE_", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    indexes: Path = Field(Path("indexes"), description="Folder of the indexes.")
    index: str = Field("sample", description="Name of the index to search.")
    pair: str = Field(
        DEFAULT_PAIR, description="Pair whose query encoder is used: a registered name or a .toml."
    )
    threads: int = Field(
        default_factory=available_cpus,
        ge=1,
        description="Threads for encoding and searching; by default the processors that the "
        "affinity mask and the cgroup quota allow.",
    )
    max_query_chars: int = Field(2000, ge=1, description="Longest query [characters].")
    max_top_k: int = Field(1000, ge=1, description="Largest top_k.")
    max_batch: int = Field(64, ge=1, description="Most queries in one batch request.")
    max_body_bytes: int = Field(1_048_576, ge=1, description="Largest request body [bytes].")
    max_in_flight: int = Field(
        256, ge=1, description="Queries in work or waiting; one more is answered with 429."
    )
    cache_entries: int = Field(
        10_000, ge=0, description="Queries whose hits are kept in memory; 0 turns the cache off."
    )
    admin_token: SecretStr | None = Field(
        None, description="Bearer token for POST /index/reload; without one the route is closed."
    )
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="debug, info, warning, error."
    )
