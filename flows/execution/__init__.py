"""Running DVC stages: worktrees, forked processes, what they need."""
