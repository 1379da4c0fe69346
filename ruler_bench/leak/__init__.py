"""The leak lab: arms, their records side by side, and the verdict over them."""
