"""Every knob of every command, as typed dataclasses: no torch here, so a mistake is reported in a blink."""
