"""The main job: scripted agents work on broken real projects in sandboxes and are scored in other sandboxes. On `libdsec` alone."""
