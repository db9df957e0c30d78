"""Attention kernels: `dispatch` for packed rows and KV caches, `paged` for pages."""
