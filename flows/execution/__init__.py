"""Running DVC stages: worktrees, forked processes, time and energy."""
