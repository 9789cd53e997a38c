"""The lab: tasks and engines to try HDET with. It imports hdet; hdet never imports it."""
