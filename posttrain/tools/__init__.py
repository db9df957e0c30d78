"""Tools: typed functions that the policy calls, and the formats in which models write such calls."""
