"""Vision towers: attention whose queries are spread over ranks."""

from .query_shard import activation_bytes, attend_share, even_shares, query_sharded_attention

__all__ = ["activation_bytes", "attend_share", "even_shares", "query_sharded_attention"]
