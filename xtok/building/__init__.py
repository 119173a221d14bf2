"""Build maps: multitoken, exact, sort_cut, build, events, spellings."""
