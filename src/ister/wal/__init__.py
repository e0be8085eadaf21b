"""The write-ahead log: messages become durable in local files. Step 1 of a message.

log             the log of one topic: append, wait, trim, rotate, close
gate            whether it accepts appends, and what holds them back
levels          its watermarks, and who waits for them
commit          group commit: which thread writes and syncs, and when
buffer          messages from `append` until they are written
writer          the one writer of the files: write, sync, rotation
waiters         calls that wait until a watermark passes an offset
scheduler       the threads that commit and maintain all logs
checkpointer    the checkpoint: what it says, when it is saved
directory       the names in a topic's directory
recovery        opening files after a crash: where they end, what is damaged
index           the sparse index of a file
reader          reads frames back, a chunk at a time
snapshot        files as the checkpoint describes them, for other processes
signals         protection against exceptions that signal handlers raise
settings        the settings of one log
"""
