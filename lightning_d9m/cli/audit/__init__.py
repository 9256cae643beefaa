"""``d9m audit`` and its commands.

The words of a command come in; its report goes out as text, JSON, Markdown and plots. Read
``command.py`` first, which chooses among the three others.
"""
