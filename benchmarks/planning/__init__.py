"""The numbers of `dynbus plan` beside those that engines which compute really take."""
