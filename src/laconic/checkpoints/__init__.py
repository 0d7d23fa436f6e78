"""A checkpoint on disk: a directory with one file per rank.

    laconic.json             the manifest: the valid save, its number of ranks, its step
    rank-0-of-4.7-x.pt ...   each rank's state; 7 is the save's serial, x its random token

Ranks may share the directory, or each host may have its own. A save with serial s has three
phases, and each begins after all ranks have completed the one before:

1. Every rank writes its file, which no manifest names yet, and a manifest under another name.
2. Every rank renames that manifest to ``laconic.json``.
3. Every rank deletes the files of saves older than s.

So while any manifest names s, all files of s exist. While any names an older save, the files of
that save still exist. However a save ends, the newest manifest that a rank can see belongs to a
complete checkpoint, and `laconic.load` takes it. The next save has a higher serial than any file
present, and deletes what an interrupted save has left, and what ranks have received in a load.
"""
