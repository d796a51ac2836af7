"""Its core: one process that decides what runs next, and sees no tensor."""
