"""What a run wrote, as one page to look at and as figures for papers. Nothing here trains."""
