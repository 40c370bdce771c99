"""Show what a run wrote: one page to look at, and figures for papers. Nothing here trains."""
