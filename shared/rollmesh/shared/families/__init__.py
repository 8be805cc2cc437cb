"""Generated task families that several services know: whoever shows the task, and whoever judges it."""
